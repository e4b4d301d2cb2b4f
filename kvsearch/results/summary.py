"""What a run found: everything that a report shows."""

from dataclasses import dataclass, field, fields
from typing import Any

from kvsearch.results.records import (
    REPORT,
    Curve,
    Example,
    Interval,
    Kind,
    Limits,
    Recheck,
    Row,
    Trial,
    plain,
)
from kvsearch.results.study import Model, Settings, Study, Texts


@dataclass(frozen=True)
class Summary:
    """Everything a report shows.

    Attributes:
        study: what was asked, of which model and texts.
        rows: report rows, best NLL first; `full` is among them.
        trials: all trials, in order.
        recommended: name of the row to deploy at the budget, or None.
        counts: trials by state.
        rechecks: comparisons printed beside the table, whatever their outcome.
        seconds: wall time of the run, or of its last part where `resumed`; None of a killed run.
        resumed: whether the run was begun before, by another process or call.
        importances: share of each axis in what is expected to change around the best policies.
        behind: name -> how far a baseline was behind the recommended policy on the search text,
            where it was not among the best few of its kind and so was not measured further.
        dropped: name -> why, of policies that could not be measured on the report text.
        examples: of prompts: answers of the full cache, the recommended policy and the best
            published method.
        curves: the recommended policy and the best published method at several sizes.
        limits: what the recommended policy may lose; `results.verdict` judges it.
        open: what an unfinished run has not measured yet, in a sentence; empty once it has ended.
            Its rows may be of the search text: `text.report` says which text they are of.
    """

    study: Study
    rows: list[Row]
    trials: list[Trial]
    recommended: str | None
    counts: dict[str, int]
    rechecks: list[Recheck] = field(default_factory=list)
    seconds: float | None = 0.0
    resumed: bool = False
    importances: dict[str, float] = field(default_factory=dict)
    behind: dict[str, Interval] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    curves: tuple[Curve, ...] = ()
    limits: Limits = field(default_factory=Limits)
    open: str = ""

    @property
    def model(self) -> Model:
        """The model."""
        return self.study.model

    @property
    def text(self) -> Texts:
        """The search, select and report parts."""
        return self.study.text

    @property
    def settings(self) -> Settings:
        """What options came to."""
        return self.study.settings

    @property
    def budget_bytes(self) -> int:
        """Bytes per sequence, the limit of `bytes_peak`."""
        return self.settings.budget_bytes

    @property
    def about(self) -> dict[str, Any]:
        """Model, texts and settings as JSON."""
        rows = {"intervals_corrected_for_rows": len(self.rows) - 1} if self.rows else {}
        settings = {**self.settings.plain(), "versions": self.study.versions, **rows}
        return {"model": self.model.plain(), "text": self.text.plain(), "settings": settings}

    def document(self) -> dict[str, Any]:
        """As JSON, for `kvsearch run --json` and `kvsearch report --json`."""
        found = {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "study"}
        return {**self.about, "budget_bytes": self.budget_bytes, **found}

    def row(self, name: str) -> Row:
        """The row called `name`."""
        return next(r for r in self.rows if r.name == name)

    def against(self, kind: Kind) -> Recheck | None:
        """The recommended policy against the best of a kind, on the report text."""
        best = (r for r in self.rechecks if r.text == REPORT and r.policy == self.recommended)
        return next((r for r in best if self.row(r.against).kind == kind), None)

    @property
    def gain(self) -> Recheck | None:
        """The best proposal against the best policy that the search began with, on the report text.

        None where one of them has no row.
        """
        found = [
            r
            for r in self.rechecks
            if r.text == REPORT
            and self.row(r.policy).kind == "searched"
            and self.row(r.against).kind not in ("searched", "full")
        ]
        return max(found, key=lambda r: r.dnll.mean, default=None)
