"""From the files of a run to the summary that reports draw. Nothing is measured here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import hypot
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from kvsearch.app.report_windows import looks
from kvsearch.config.study import Settings, Study
from kvsearch.errors import RunError
from kvsearch.evaluation.measurement import Answered, kept
from kvsearch.files import write_atomic, write_parquet
from kvsearch.pareto import front
from kvsearch.policy import ModelShape, check, layout
from kvsearch.policy_search import run_files
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.run_files import Measured, MeasuredRow
from kvsearch.records import (
    REPORT,
    Curve,
    Discordant,
    Interval,
    MeasuredPolicy,
    Needle,
    Recheck,
    Row,
    Summary,
    Trial,
    columns,
)
from kvsearch.report import write_report
from kvsearch.stats import (
    Blocks,
    Spread,
    common,
    corrected,
    interval,
    long_blocks,
    mcnemar,
    paired,
    spread_of,
    standard_error,
    through,
    wilson,
)


class Unfinished(RunError):
    """A run that has measured nothing on the report text yet."""


def shape_from(model: dict[str, Any]) -> ModelShape:
    """The shape that a run recorded."""
    return ModelShape(**model["shape"])


def read(folder: RunFolder) -> Summary:
    """Rebuild the summary of a finished run.

    Raises:
        Unfinished: the folder holds no finished run.
        KvsearchError: it is damaged.
    """
    try:
        study = Study.read(folder.path / "study.json")
        measured = run_files.measured(folder.path / "measured.json")
    except FileNotFoundError as e:
        raise Unfinished(
            f"{folder.path} holds no finished run ({Path(e.filename).name} is missing); run the "
            "same `kvsearch run` again to finish it"
        ) from e
    for m in measured.rows:
        check(m.policy, study.shape)
    return build(folder, study, measured)


def build(folder: RunFolder, study: Study, measured: Measured, part: str = "report") -> Summary:
    """The summary of rows that were measured on a part of the text or prompts.

    Args:
        folder: of the run, with its losses.
        study: its `study.json`.
        measured: its `measured.json`, or what of it there is.
        part: where the rows were measured.
    """
    of, trials = _Comparison(folder, study, measured, part), folder.trials()
    searched = {t.fingerprint: t.dnll for t in trials if t.dnll is not None}
    rows = [of.row(m, searched.get(m.fingerprint)) for m in measured.rows]
    return Summary(
        model=study.model.plain(),
        text=study.text.plain(),
        settings={
            **study.settings.plain(),
            "versions": study.versions,
            "intervals_corrected_for_rows": len(rows) - 1,
        },
        budget_bytes=study.settings.budget_bytes,
        rows=sorted(rows, key=lambda r: r.nll),
        trials=trials,
        recommended=measured.recommended,
        counts=Counter(t.state for t in trials),
        rechecks=of.rechecks(_looks(study.settings)),
        seconds=measured.seconds,
        resumed=measured.resumed,
        importances=run_files.importances(folder.path / "importances.json"),
        behind=measured.behind,
        dropped=measured.dropped,
        curves=of.curves(),
        needles=measured.needles,
        examples=tuple(measured.examples),
    )


class _Comparison:
    """The rows of a report, and what they are compared by.

    Attributes:
        nll: losses of every row, by name.
        middle: losses of the recommended policy; through it all rows are compared.
        points: peak bytes and loss of every row, by name.
        level, spread: of the intervals of rows.
    """

    def __init__(self, folder: RunFolder, study: Study, measured: Measured, part: str) -> None:
        self.folder, self.measured, self.part = folder, measured, part
        settings, self.shape = study.settings, study.shape
        self.budget, self.start = settings.budget_bytes, settings.score_from - 1
        self.tokens = settings.context, settings.prompt
        self.rows = {m.name: m for m in measured.rows}
        self.nll = {n: self._losses(part, m.fingerprint) for n, m in self.rows.items()}
        _alike(self.nll, folder.path)
        self.middle = self.nll[measured.recommended or "full"]
        self.points = {
            n: (
                layout(m.policy, self.shape).bytes_peak(*self.tokens),
                sum(x.mean() for x in through(self.nll[n], self.middle)),
            )
            for n, m in self.rows.items()
        }
        names = list(self.points)
        self._front = {names[i] for i in front([self.points[n] for n in names])}
        self.level = corrected(len(names) - 1)
        self.spread = spread_of(self.nll.values(), self.middle, self.nll["full"])

    def row(self, m: MeasuredRow, search_dnll: float | None) -> Row:
        """A row with its figures."""
        name, mine, full = m.name, self.nll[m.name], self.nll["full"]
        parts = through(mine, self.middle)
        peak, mean = self.points[name]
        best = self._best(name)
        over_full = interval(
            *through(mine, self.middle, full), level=self.level, spread=self.spread
        )
        over_best = None
        if best is not None:
            a, b = common(mine, self.nll[best])
            over_best = paired(a, b, level=self.level, spread=self.spread)
        return Row(
            **{f.name: getattr(m, f.name) for f in fields(MeasuredPolicy)},
            tokens=mine.size,
            nll=mean,
            nll_se=hypot(*(standard_error(x) for x in parts)),
            blocks=min(long_blocks(x).count for x in parts),
            ppl=float(np.exp(mean)),
            dnll_full=over_full if name != "full" else Interval(0.0, 0.0, 0.0),
            dnll_best=over_best,
            best=best,
            search_dnll=search_dnll,
            bytes_peak=peak,
            bytes_mean=layout(m.policy, self.shape).bytes_mean(*self.tokens),
            slots16=peak / self.shape.budget_bytes(1),
            on_front=name in self._front,
            within_budget=peak <= self.budget,
            windows=len(mine.sums),
            **self._answers(m),
        )

    def curves(self) -> tuple[Curve, ...]:
        """Policies at several sizes, all on the windows that every size has."""
        found = []
        for m in self.measured.sizes:
            sized = {x.bytes: self._losses(self.part, x.fingerprint) for x in m.sizes}
            sized |= {self.points[m.name][0]: self.nll[m.name]}
            few = min(sized.values(), key=lambda x: len(x.sums))
            at = []
            for size, losses in sized.items():
                mine, _ = common(losses, few)
                at.append((size, mine.mean() - common(self.nll["full"], few)[0].mean()))
            found.append(Curve(m.name, tuple(sorted(at))))
        return tuple(found)

    def rechecks(self, often: int) -> list[Recheck]:
        """The recommended policy against the best of each kind, on the report text and on others.

        Args:
            often: how often the headline may have been looked at.
        """
        best, extra = self.measured.recommended, self.measured.extra_text
        if best is None:
            return []
        out = self._rechecks(best, REPORT, self.nll, self.spread, often)
        for part, text in extra.items():
            keys = {n: self.rows[n].fingerprint for n in text.names}
            there = [n for n in text.names if self.folder.has_losses(part, keys[n])]
            nll = {n: self._losses(part, keys[n]) for n in there}
            _alike(nll, self.folder.path)
            both = {best, "full"} <= nll.keys()
            its = spread_of(nll.values(), nll[best], nll["full"]) if both else None
            out += self._rechecks(best, text.label, nll, its, 1)
        return out

    def _rechecks(
        self, best: str, text: str, nll: dict[str, Blocks], spread: Spread | None, often: int
    ) -> list[Recheck]:
        """The recommended policy against the best of each kind on one text."""
        out = []
        for kind in ("method", "combined", "earlier"):
            rivals = [n for n in nll if self.rows[n].kind == kind and n != best]
            rivals = _longest([n for n in rivals if n in self.measured.compared], nll)
            if best in nll and rivals:
                rival = min(rivals, key=lambda n: nll[n].mean())
                a, b = common(nll[best], nll[rival])
                level = corrected(often if kind != "earlier" else 1)
                found = paired(a, b, level=level, spread=spread)
                out.append(Recheck(text, best, rival, found, a.size))
        if best in nll and "full" in nll and best != "full":
            a, b = common(nll[best], nll["full"])
            out.append(Recheck(text, best, "full", paired(a, b, spread=spread), a.size))
        return out

    def _best(self, name: str) -> str | None:
        """The best published method within the budget, or within the row's bytes if more."""
        limit = max(self.points[name][0], self.budget)
        methods = [n for n, m in self.rows.items() if m.kind == "method" and n != name]
        rivals = _longest([n for n in methods if self.points[n][0] <= limit], self.nll)
        return min(rivals, key=lambda n: self.points[n][1], default=None)

    def _answers(self, m: MeasuredRow) -> dict[str, Any]:
        """Fields of a row on prompts; none on a text."""
        full, best = self.rows["full"], self.rows.get(self.measured.recommended or "")
        found = _answered(m.answers, self.nll[m.name], self.nll["full"], full.answers)
        if best is not None and best.answers and best is not m:
            found["discordant"] = _discordant(m.answers, best.answers)
        return found

    def _losses(self, part: str, fingerprint: str) -> Blocks:
        return self.folder.losses(part, fingerprint, self.start)


def write(summary: Summary, folder: Path) -> None:
    """Write the report, the policies and the tables of a run; nothing before there are rows."""
    if summary.rows:
        write_report(summary, folder, shape=shape_from(summary.model))
        write_tables(summary, folder)


def write_tables(summary: Summary, folder: Path) -> None:
    """Write `trials.parquet` and, if one is recommended, `best.json`."""
    types = {f.name: _arrow(f.type) for f in fields(Trial)}
    found = columns(Trial, summary.trials)
    table = pa.table({name: pa.array(found[name], type=types[name]) for name in found})
    write_parquet(folder / "trials.parquet", table)
    if summary.recommended is not None:
        row = summary.row(summary.recommended)
        about = {
            "model": summary.model["name"],
            "nll": row.nll,
            "dnll_full": row.dnll_full.mean,
            "bytes_peak": row.bytes_peak,
            "tokens": row.tokens,
        }
        best = row.policy.model_copy(update={"name": row.name, "about": about})
        write_atomic(folder / "best.json", best.to_json())
        if best.rule is not None and best.rule.files:
            from kvsearch.models.learned import beside  # loads torch

            best.rule.lies_in(folder)  # where an earlier report left them, perhaps elsewhere
            for name, data in beside(best).items():
                write_atomic(folder / name, data)


def _arrow(kind: Any) -> pa.DataType:
    """The type of a column, also where nothing in it is known; what is no number is text."""
    kinds = get_args(kind) or (kind,)
    return pa.int64() if int in kinds else pa.float64() if float in kinds else pa.string()


def _alike(nll: Mapping[str, Blocks], folder: Path) -> None:
    """Refuse losses of windows of different lengths, which cannot be of one text."""
    for name, found in nll.items():
        first = next(iter(nll.values()))
        if not found.sums.size or not np.array_equal(found.tokens, first.tokens):
            raise RunError(
                f"{folder} is damaged: the losses of {name} are of other windows than those of "
                f"{next(iter(nll))}; restore its files in nll, or run the search again with "
                "another --out"
            )


def _longest(names: list[str], nll: Mapping[str, Blocks]) -> list[str]:
    """Those on the most windows: the others are certainly behind, and little is known of them."""
    most = max((len(nll[n].sums) for n in names), default=0)
    return [n for n in names if len(nll[n].sums) == most]


def _answered(
    answers: Sequence[Answered],
    mine: Blocks,
    full: Blocks,
    full_answers: Sequence[Answered],
) -> dict[str, Any]:
    """Answers of a row on prompts, in all and by workload; nothing on a text.

    An item's loss is a share of its context times the weight of its workload, and the mean over
    all items is the weighted one over workloads.
    """
    if not answers:
        return {}
    gap = (mine.sums - full.sums[: len(mine.sums)])[:, 0]
    names = list(dict.fromkeys(a.of for a in answers))
    found = []
    for name in names:
        at = [i for i, a in enumerate(answers) if a.of == name]
        lost = paired(gap[at, None] / answers[at[0]].weight, np.zeros((len(at), 1)))
        found.append(kept(name, lost, [answers[i] for i in at], [full_answers[i] for i in at]))
    exact = [x for a in answers for x in a.exact]
    needles = tuple(Needle(a.of, *a.needle, a.exact[0]) for a in answers if a.needle)
    return {
        "exact": wilson(sum(exact), len(exact)), "workloads": tuple(found), "needles": needles
    }  # fmt: skip


def _discordant(mine: Sequence[Answered], best: Sequence[Answered]) -> Discordant:
    """Exact answers of a row against the recommended one's, on contexts that both have."""
    pairs = [
        (x, y)
        for a, b in zip(mine, best, strict=False)
        for x, y in zip(a.exact, b.exact, strict=True)
    ]
    row, its = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    return Discordant(row, its, mcnemar(row, its))


def _looks(of: Settings) -> int:
    """How often the headline may have been looked at, where there were windows for it alone."""
    return 1 if of.headline_windows is None else len(looks(of.report_windows, of.headline_windows))
