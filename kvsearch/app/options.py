"""The options of a search, declared once.

A field of `RunOptions` is a keyword of `kvsearch.search`, an option of `kvsearch run` and of the
commands that share it, a key of run.yaml, and a key of `options` in study.json. What follows from
the options alone, and contradictions that need no model, are here as well.
"""
# ruff: noqa: RUF009 (`option` makes a field)

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvsearch.app.arguments import (
    check_batch,
    check_counts,
    check_see,
    check_workers,
    names,
    several,
    texts,
    which,
)
from kvsearch.app.budget import check_budget
from kvsearch.errors import KvsearchError, TextError, named, nearest, quoted
from kvsearch.models.aliases import DEFAULT as DEFAULT_MODEL
from kvsearch.policy_search.executors.cluster import require_ray
from kvsearch.policy_search.executors.spawning import require_main
from kvsearch.policy_search.portfolio import DEFAULT as DEFAULT_PORTFOLIO
from kvsearch.policy_search.samplers import DEFAULT as DEFAULT_SAMPLER
from kvsearch.policy_search.samplers import NAMES, name_of
from kvsearch.text import TextLike
from kvsearch.workloads import See, TaskSpec, expanded, parse
from kvsearch.workloads.files import Record, read, read_all
from kvsearch.workloads.parts import divided, require_names
from kvsearch.workloads.tasks.base import Split

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from kvsearch.models.load import LoadedModel

Engine = Literal["kvsearch", "tune"]
OBJECTIVES = ("nll", "bytes", "throughput")
DEFAULT_SPACE = "default"
PROMPT_SPACE = "prompts"  # the default one, and when to compact
SLOTS = 256.0  # the budget where none is given
PROPOSALS = 6  # of Ray Tune, which is told their number before
MOST_PROPOSALS = 12  # of `--trials auto`
LEAST_SCORED = 64  # tokens of a window
STEP = 4  # contexts that a policy starts with, and gets at a time
STEP_TOKENS = 1024  # of a text, likewise: in shorter windows, several together


def _paths(given: str | PathLike[str] | Sequence[str | PathLike[str]]) -> tuple[Path, ...]:
    return tuple(map(Path, several(given)))


def _path(given: str | PathLike[str] | None) -> Path | None:
    return None if given is None else Path(given)


def _tasks(given: str | Sequence[str]) -> tuple[str, ...]:
    return expanded(several(given))


def option(default: Any, told: str, convert: Callable[..., Any] | None = None, **how: str) -> Any:
    """A field of `RunOptions`.

    Args:
        default: as on the command line.
        told: the help of the command line.
        convert: from what a caller may give to the value of the field.
        how: `metavar`; `flags`, the spellings if not the name; `shown`, the default there.
    """
    return field(default=default, metadata={"help": told, "convert": convert, **how})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One search. `kvsearch.search` says more about each option.

    Lengths are in tokens. Of the two budgets one is set: `budget_slots` in fp16 slots per layer,
    `budget_bytes` in bytes per sequence.
    """

    budget_slots: float | None = option(
        None,
        "memory, everything counted, in fp16 slots per layer [default: 256]",
        metavar="SLOTS", flags="--budget --budget-slots",
    )  # fmt: skip
    budget_bytes: int | None = option(
        None,
        "the same per sequence in bytes, or as 5MB or 4.8MiB, instead",
        metavar="BYTES",
    )
    model: "str | LoadedModel" = option(DEFAULT_MODEL, "alias, hub id, folder or .gguf file", which)
    dtype: str = option("auto", "auto, float32, bfloat16, float16")
    device: str = option(
        "auto", "auto, cpu, cuda, cuda:N, or several that share the layers: cuda:0,cuda:1"
    )
    text: tuple[TextLike, ...] = option(
        (),
        "text file, or FILE:START-END in bytes; repeatable. Default: Python's own reference",
        texts,
        metavar="FILE",
    )
    dataset: str | None = option(None, "wikitext2, pg19, ptb, ... from the Hugging Face hub")
    report_text: tuple[TextLike, ...] = option(
        (), "report on this text instead of on a part of --text", texts, metavar="FILE"
    )
    extra_text: tuple[TextLike, ...] = option(
        (),
        "check the recommended policy on this text as well; repeatable",
        texts,
        metavar="FILE",
    )
    context: int = option(1536, "tokens of a window")
    windows: int = option(
        16,
        "windows that the search sees; fewer where the text is too short. Every policy starts on "
        "one, and the best few get more",
    )
    report_windows: int = option(
        2,
        "windows of the report; methods that are certainly behind are measured on fewer, and "
        "where these leave the headline undecided, its policies on up to eight times as many",
    )
    tasks: tuple[str, ...] = option(
        (),
        "answers to prompts instead of a text: see `kvsearch tasks`; repeatable; `ruler` is all "
        "of RULER",
        _tasks,
        metavar="NAME[:N][,tokens=N]", flags="--task",
    )  # fmt: skip
    see: See = option(
        "agnostic",
        "whether a question arrives after the context was compressed, or is part of the prompt",
    )
    prompts: tuple[Path, ...] = option(
        (),
        "the same on your own prompts (.jsonl, .json, .csv, .parquet), or on a set of the hub: "
        "ruler, loogle, longbench, hf:OWNER/NAME, with :CONFIG and @SPLIT; repeatable",
        _paths,
        metavar="FILE",
    )
    report_prompts: tuple[Path, ...] = option(
        (),
        "report on these prompts instead of on a part of --prompts; once for each of those",
        _paths,
        metavar="FILE",
    )
    items: int = option(
        16,
        "contexts of each task or file that the search sees; the report has as many others, and "
        "up to four times as many where they leave the headline undecided",
    )
    score_from: int | None = option(None, "first scored position [default: the budget in slots]")
    batch: int | None = option(
        None, "windows per forward pass  [default: as many as fit on a GPU, 1 on a CPU]"
    )
    trials: int | None = option(
        None,
        "policies beyond the methods; auto: up to 12, while the search expects to gain by them",
        shown="auto",
    )
    space: str = option(DEFAULT_SPACE, "search space: name or YAML file", str)
    target: str | None = option(
        None,
        "search only what this runtime can execute, see `kvsearch targets`",
        metavar="RUNTIME",
    )
    sampler: "str | BaseSampler" = option(DEFAULT_SAMPLER, ", ".join(NAMES))
    objectives: tuple[str, ...] = option("nll,bytes", "nll,bytes or nll,bytes,throughput", names)
    warm_start: bool = option(True, "start from the published methods")
    exclude_method: tuple[str, ...] = option(
        (), "leave a method out of the warm start; repeatable", names, metavar="METHOD"
    )
    all_methods: bool = option(
        False,
        "compare with every published method, not only with those that were ever the best of "
        "their kind, and give each a row of the report, not only the best few on the search text",
    )
    portfolio: str = option(
        DEFAULT_PORTFOLIO,
        "policies of earlier searches to evaluate first",
        str,
        metavar="FILE|none",
    )
    seed: int = option(0, "of the sampler")
    workers: int | None = option(
        None,
        "evaluate in this many processes, one per GPU in turn; with --ray, actors; 0 is this "
        "process [default: on a CPU 2 to 4 for long runs, else 0; with --ray, one per GPU of the "
        "cluster, or 2]",
    )
    gpus_per_evaluator: int = option(
        0,
        "spread the model of each evaluator over N GPUs [default: 1, or all of --device]",
        metavar="N",
    )
    ray: str | None = option(
        None,
        "evaluate in actors of a Ray cluster, or of a local Ray started for this run",
        metavar="ADDRESS|local",
    )
    engine: Engine = option(
        "kvsearch",
        "tune runs the evaluations in Ray Tune: every policy on all windows, Tune's own tables",
    )
    bench: bool = option(True, "measure decode speed at the end")
    minutes: float | None = option(
        None,
        "stop after so many, with a report of what is known by then; the same command goes on",
    )
    heads: Path | None = option(
        None,
        "losses of the KV heads, written by `kvsearch heads` or a run [default: shipped, kept on "
        "disk, or measured once]",
        _path,
        metavar="FILE",
    )
    measure_heads: bool = option(
        False, "measure what the KV heads lose, even where that is shipped or kept on disk"
    )
    out: Path | None = option(None, "folder of the run [default: runs/...]", _path)

    def __post_init__(self) -> None:
        own = vars(self)
        for f in fields(self):
            if f.metadata["convert"] is not None:
                own[f.name] = f.metadata["convert"](own[f.name])
        if self.budget_slots is None and self.budget_bytes is None:
            own["budget_slots"] = SLOTS

    def plain(self) -> dict[str, Any]:
        """Options that are not the default, as JSON that `kvsearch run --config` reads back.

        What is in memory only is its name, which nothing reads back.
        """
        found = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(f.default, str) and isinstance(value, tuple):
                value = ",".join(value)
            if value != f.default:
                found[f.name] = _plain(value)
        return found

    @property
    def prompted(self) -> bool:
        """Whether policies are measured on prompts and answers, and not on a text."""
        return bool(self.tasks or self.prompts)

    @property
    def most_trials(self) -> int:
        """Free proposals at most: with `auto`, None, they end when nothing is to be gained."""
        if self.trials is not None:
            return self.trials
        return PROPOSALS if self.engine == "tune" else MOST_PROPOSALS

    @property
    def together(self) -> int:
        """Windows, or prompts, that policies start with, and that are one job of several
        evaluators; of prompts, as many of each workload. In Ray Tune, which sees one result per
        trial, all of them."""
        if self.engine == "tune":
            return self.searched
        if self.prompted:
            count = len(self.tasks) + len(self.prompts)
            return count * max(1, STEP // count)
        if self.batch is None:
            return max(1, -(-STEP_TOKENS // self.context))
        return self.batch

    @property
    def space_name(self) -> str:
        """The space that is searched: prompts have one of their own by default."""
        own = self.prompted and self.space == DEFAULT_SPACE
        return PROMPT_SPACE if own else self.space

    @property
    def grows(self) -> bool:
        """Whether the best policies get more windows than they start with."""
        return self.engine != "tune" and self.searched > 1

    @property
    def searched(self) -> int:
        """Windows, or prompts of all workloads, that the search may measure a policy on."""
        many = self.items * (len(self.tasks) + len(self.prompts))
        return many if self.prompted else self.windows

    @property
    def longest(self) -> int:
        """Tokens that the model must have positions for, as far as the options say."""
        return max((s.tokens for s in self.specs()), default=1) if self.prompted else self.context

    def specs(self) -> list[TaskSpec]:
        """The tasks; raises a `KvsearchError` for one that there is not."""
        return [parse(spec) for spec in self.tasks]

    @cached_property
    def records(self) -> dict[str, dict[Split, list[Record]]]:
        """Records of the files of prompts, by name and in disjoint parts.

        Raises:
            KvsearchError: a file cannot be used, or the files for the report do not fit these.
        """
        own = self.report_prompts
        if own and len(own) != len(self.prompts):
            raise KvsearchError(
                f"give --report-prompts once for each --prompts and in their order, got {len(own)} "
                f"for {len(self.prompts)}"
            )
        found: dict[str, dict[Split, list[Record]]] = {}
        for i, (name, records) in enumerate(read_all(self.prompts).items()):
            report = (read(own[i]), own[i].name) if own else ()
            found[name] = divided(name, records, *report)
        return found

    def check(self) -> None:
        """Raise a `KvsearchError` for what shows without the model: contradictions, or no Ray."""
        check_budget(self.budget_slots, self.budget_bytes)
        if min(self.most_trials, self.workers or 0, self.gpus_per_evaluator) < 0:
            raise KvsearchError("--trials, --workers and --gpus-per-evaluator cannot be below 0")
        if self.ray is None and self.engine != "tune":
            check_workers(self.workers or 0)
            require_main(self.workers)
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise KvsearchError(f"--minutes must be a number above 0, got {self.minutes:g}")
        check_batch(self.batch)
        check_counts(
            context=self.context, windows=self.windows, report_windows=self.report_windows,
            score_from=self.score_from,
        )  # fmt: skip
        if self.objectives not in (OBJECTIVES[:2], OBJECTIVES):
            raise KvsearchError(
                f"--objectives must be {','.join(OBJECTIVES[:2])} or {','.join(OBJECTIVES)}, "
                f"got {named(','.join(self.objectives))}"
            )
        if self.engine not in get_args(Engine):
            raise KvsearchError(
                f"unknown engine {quoted(self.engine)}{nearest(self.engine, get_args(Engine))}"
            )
        if self.engine == "tune" or self.ray is not None:
            require_ray()
        if self.engine == "tune" and self.gpus_per_evaluator > 1:
            raise KvsearchError("--engine tune gives each trial one GPU: no --gpus-per-evaluator")
        if self.target is not None and self.space != DEFAULT_SPACE:
            raise KvsearchError("--target searches a space of its own; leave --space out")
        if self.report_prompts and not self.prompts:
            raise KvsearchError("--report-prompts is the report part of --prompts; give both")
        if self.prompted:
            self._check_prompts()
        elif self.score_from is not None or self.budget_slots is not None:
            self.first_scored(self.budget_slots or 0.0)

    def _check_prompts(self) -> None:
        check_counts(items=self.items)
        check_see(self.see)
        require_names([*(spec.label for spec in self.specs()), *self.records])
        given = {
            "--report-text": self.report_text, "--extra-text": self.extra_text,
            "--score-from": self.score_from, "--batch": self.batch,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise KvsearchError(f"{name} is for a search on a text, not on prompts")

    def first_scored(self, slots: float) -> int:
        """First scored position: by default the first at which a full budget of `slots` matters.

        Raises:
            TextError: fewer than `LEAST_SCORED` tokens of a window would be scored.
        """
        start = max(1, int(slots)) if self.score_from is None else self.score_from
        if not 1 <= start <= self.context - LEAST_SCORED:
            raise TextError(
                f"scoring from position {start} leaves fewer than {LEAST_SCORED} tokens of a "
                f"{self.context}-token window; raise --context or lower --budget"
            )
        return start


def _plain(value: Any) -> Any:
    """A value of an option in JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if isinstance(value, PathLike):
        return str(value)
    return getattr(value, "name", None) or name_of(value)  # a model, a text or a sampler in memory
