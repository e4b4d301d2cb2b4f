"""The main job as a function: search, choose and report. `kvsearch run` calls it."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.app.options import RunOptions
from kvsearch.app.progress import Shown, TimeUp
from kvsearch.app.run import Run
from kvsearch.models.aliases import DEFAULT as DEFAULT_MODEL
from kvsearch.models.load import LoadedModel
from kvsearch.pareto import front
from kvsearch.policy import Policy
from kvsearch.policy_search.portfolio import DEFAULT as DEFAULT_PORTFOLIO
from kvsearch.policy_search.samplers import DEFAULT as DEFAULT_SAMPLER
from kvsearch.records import Row, Summary, Trial, columns, plain
from kvsearch.report.tables import bytes_text
from kvsearch.text import TextLike
from kvsearch.workloads import See

if TYPE_CHECKING:
    import pandas as pd
    from optuna.samplers import BaseSampler


@dataclass(frozen=True, eq=False, repr=False)
class SearchResult:
    """What a search found.

    Attributes:
        summary: rows on the report text, all trials, and what was asked.
        folder: the run folder; the same call with it goes on.
    """

    summary: Summary
    folder: Path

    @property
    def front(self) -> list[Row]:
        """Rows that no other beats in both loss and bytes, on the report text; by rising bytes."""
        return sorted((r for r in self.summary.rows if r.on_front), key=lambda r: r.bytes_peak)

    @property
    def best(self) -> Policy | None:
        """The recommended policy within the budget; None if no policy fits."""
        if self.summary.recommended is None:
            return None
        row = self.summary.row(self.summary.recommended)
        return row.policy.model_copy(update={"name": row.name})

    def to_frame(self) -> "pd.DataFrame":
        """All trials, a row each, with every field of `kvsearch.records.Trial`.

        Policies and parameters are JSON.
        """
        import pandas as pd

        return pd.DataFrame(columns(Trial, self.summary.trials))

    def report(self) -> Path:
        """The page to open: `report.html` in the folder."""
        return self.folder / "report.html"

    def document(self) -> dict[str, Any]:
        """What `kvsearch run --json` prints."""
        return {"out": str(self.folder), "interrupted": False, **plain(self.summary)}

    def __repr__(self) -> str:
        s = self.summary
        head = f"SearchResult: {len(s.trials)} policies tried, {len(self.front)} on the front, "
        if s.recommended is None:
            return f"{head}none within the budget; {self.report()}"
        row = s.row(s.recommended)
        return (
            f"{head}best {row.name!r} at {bytes_text(row.bytes_peak)}, dNLL {row.dnll_full} "
            f"nats/token to the full cache (n = {row.tokens}); {self.report()}"
        )


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a search; the same call with the same folder goes on.

    Attributes:
        summary: of what is known, see `app/so_far.py`; its trials are those that ended.
        folder: the run folder.
        trials: what was measured by then on the search text, best first.
    """

    def __init__(self, summary: Summary, folder: Path) -> None:
        super().__init__("interrupted; the same call goes on from here")
        self.summary, self.folder = summary, folder
        done = [t for t in summary.trials if t.state == "complete"]
        self.trials = sorted(done, key=lambda t: t.dnll or 0.0)  # windows differ in difficulty

    def document(self) -> dict[str, Any]:
        """What `kvsearch run --json` prints after Ctrl-C; `front` names trials, by rising bytes."""
        best = front([(float(t.bytes_peak or 0), t.dnll or 0.0) for t in self.trials])
        return {
            "out": str(self.folder),
            "interrupted": True,
            "front": [self.trials[i].name for i in best],
            **plain(self.summary),
        }


def search(
    model: str | PathLike[str] | LoadedModel = DEFAULT_MODEL,
    text: TextLike | Sequence[TextLike] | None = None,
    *,
    budget_slots: float | None = None,
    budget_bytes: int | None = None,
    dataset: str | None = None,
    report_text: TextLike | Sequence[TextLike] = (),
    extra_text: TextLike | Sequence[TextLike] = (),
    context: int = 1536,
    windows: int = 16,
    report_windows: int = 2,
    tasks: str | Sequence[str] = (),
    prompts: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    report_prompts: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    see: See = "agnostic",
    items: int = 16,
    score_from: int | None = None,
    trials: int | None = None,
    space: str | PathLike[str] = "default",
    target: str | None = None,
    sampler: "str | BaseSampler" = DEFAULT_SAMPLER,
    objectives: str | Sequence[str] = ("nll", "bytes"),
    warm_start: bool = True,
    exclude_method: str | Sequence[str] = (),
    all_methods: bool = False,
    portfolio: str | PathLike[str] = DEFAULT_PORTFOLIO,
    seed: int = 0,
    workers: int | None = 0,
    gpus_per_evaluator: int = 0,
    ray: str | None = None,
    engine: str = "kvsearch",
    bench: bool = True,
    minutes: float | None = None,
    heads: str | PathLike[str] | None = None,
    measure_heads: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    batch: int | None = None,
    out: str | PathLike[str] | None = None,
    progress: bool = False,
) -> SearchResult:
    """Search the policy space of a model and report the front; the same call resumes.

    The options are those of `kvsearch run`.

    Args:
        model: alias, hub id, folder or `.gguf` file; or a `LoadedModel`, see `LoadedModel.of` for
            a transformers model of your own.
        text: path of a text file, or `FILE:START-END` in bytes, or `Text("...")` for the text
            itself, or several of these; without one, Python's own language reference.
        budget_slots: memory in fp16 slots per layer, everything counted; 256 without a budget.
        budget_bytes: memory in bytes per sequence, instead.
        dataset: `wikitext2`, `pg19`, `ptb`, ... from the Hugging Face hub, instead of a text.
        report_text: report on this text instead of on a part of `text`.
        extra_text: check the recommended policy on each of these as well.
        context: tokens of a window.
        windows: windows that the search sees; fewer where the text is too short. Every policy
            starts on one, and the best few get more.
        report_windows: windows of the report, fewer for methods that are certainly behind, and up
            to eight times as many where they leave the headline undecided.
        tasks: search on prompts instead, such as `needle:4,tokens=2000`; `kvsearch tasks` lists
            them, and `ruler` is all of RULER. `text` is where facts are hidden.
        prompts: search on these files of prompts, or sets of the hub, see
            `kvsearch.workloads.files`.
        report_prompts: report on these instead of on a part of each of `prompts`.
        see: of prompts: `agnostic`: a question arrives after the context was compressed; `aware`:
            both are one prompt.
        items: contexts of each task or file that the search sees; the report has as many others,
            and up to four times as many where they leave the headline undecided.
        score_from: first scored position; by default the budget in slots.
        trials: policies to evaluate beyond the published methods; None: up to 12, and none where
            the search expects to gain less than 0.003 by them.
        space: name or YAML file of the search space.
        target: search only what this runtime can execute; a name in `kvsearch.exporters.TARGETS`.
        sampler: what proposes policies: a name of `kvsearch.policy_search.samplers.NAMES`, or an
            object such as `optuna.samplers.TPESampler(seed=1)`. With an object, `seed` has no
            effect, and a run that was killed goes on with other proposals than an uninterrupted
            one, since the state of the object is not kept.
        objectives: `nll,bytes` or `nll,bytes,throughput`.
        warm_start: evaluate the published methods first.
        exclude_method: names of methods to leave out of the warm start.
        all_methods: compare with every published method and combination, not only with those that
            were the best of their kind in some study, and give each a row of the report, not only
            the best few on the search text.
        portfolio: policies of earlier searches to evaluate first: `default`, `none`, or a file.
        seed: of the sampler.
        workers: evaluate in this many processes, or actors with `ray`; 0 is this process, None
            as many as suit the machine. A script that asks for processes needs the usual
            `if __name__ == "__main__":`.
        gpus_per_evaluator: GPUs over which each of them spreads the model; 0 is one, or all that
            `device` names.
        ray: address of a Ray cluster, or `local`.
        engine: `kvsearch`, or `tune` for Ray Tune.
        bench: measure decode speed at the end.
        minutes: stop after so many, with a report of what is known by then (`summary.open` says
            what is not); the same call goes on.
        heads: losses of the KV heads, written by `kvsearch heads` or a run; by default they are
            shipped with kvsearch, kept on disk, or measured once.
        measure_heads: measure them, whatever is shipped or kept.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`, or several with commas between them.
        batch: windows per forward pass; None: as many as fit on a GPU, one on a CPU.
        out: folder of the run; by default one below `runs` that follows from the other options.
        progress: print progress to stderr.

    Returns:
        The front, the best policy, all trials, and the folder.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
        Interrupted: Ctrl-C.
    """
    given = {name: value for name, value in locals().items() if name != "progress"}
    run = Run(RunOptions(**given), Shown(quiet=not progress, minutes=minutes))
    try:
        return SearchResult(run.go(), run.folder.path)
    except TimeUp:
        return SearchResult(run.so_far(), run.folder.path)
    except KeyboardInterrupt as stopped:
        raise Interrupted(run.so_far(), run.folder.path) from stopped
