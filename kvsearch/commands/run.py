"""The main job as a function: search, choose and report. `kvsearch run` calls it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsearch.options.function import takes
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Policy
from kvsearch.report.tables import bytes_text
from kvsearch.results.limits import judged
from kvsearch.results.pareto import front
from kvsearch.results.records import Row, Trial, columns, plain
from kvsearch.results.summary import Summary
from kvsearch.run.run import Run
from kvsearch.session.progress import Shown, TimeUp

if TYPE_CHECKING:
    import pandas as pd


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

    @property
    def within_limits(self) -> bool:
        """Whether the recommended policy loses no more than allowed, on the mean of each loss."""
        verdict = judged(self.summary)
        return verdict is not None and verdict.holds != "no"

    def to_frame(self) -> "pd.DataFrame":
        """All trials, a row each, with every field of `kvsearch.results.records.Trial`.

        Policies and parameters are JSON.
        """
        import pandas as pd

        return pd.DataFrame(columns(Trial, self.summary.trials))

    def report(self) -> Path:
        """The page to open: `report.html` in the folder."""
        return self.folder / "report.html"

    def document(self) -> dict[str, Any]:
        """What `kvsearch run --json` prints."""
        told = {"out": str(self.folder), "interrupted": False}
        return {**told, "verdict": plain(judged(self.summary)), **self.summary.document()}

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
        summary: of what is known, see `run/unfinished.py`; its trials are those that ended.
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
            **self.summary.document(),
        }


@takes(RunConfig)
def search(config: RunConfig) -> SearchResult:
    """Search the policy space of a model and report the front; the same call resumes.

    The options are those of `kvsearch run`.

    Returns:
        The front, the best policy, all trials, and the folder.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
        Interrupted: Ctrl-C.
    """
    run = Run(config, Shown(quiet=not config.progress, minutes=config.minutes))
    try:
        return SearchResult(run.go(), run.folder.path)
    except TimeUp:
        return SearchResult(run.so_far(), run.folder.path)
    except KeyboardInterrupt as stopped:
        raise Interrupted(run.so_far(), run.folder.path) from stopped
