"""The Pareto picture as numbers: what is drawn, and what tests check.

One coordinate serves both axes on the side: `y` is dNLL to the full cache, and PPL is
`ppl_full * exp(y)`, so a linear dNLL axis is a logarithmic PPL axis.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvsearch.policy import ModelShape
from kvsearch.report import facts
from kvsearch.report.describe import compact_json, describe
from kvsearch.report.tables import (
    at_least,
    bytes_text,
    interval_text,
    signed,
    verdict,
)
from kvsearch.report.words import Words, words_of
from kvsearch.results.pareto import front
from kvsearch.results.records import Curve, Interval, Kind, Row, Trial
from kvsearch.results.summary import Summary

NEAR = 0.9  # share of the budget from which a row is compared with those at it


@dataclass(frozen=True)
class Point:
    """One report row, or one trial (then `lo` and `hi` equal `y`).

    Attributes:
        x: bytes per sequence, peak.
        y: loss over the full cache, in the unit of `Words`; `lo` and `hi` are its 95 % limits. Of a
            row that was stopped because it is certainly behind the recommended policy, `lo` is how
            far at least and `hi` is `y`: little is known of its loss itself.
        details: lines of plain text.
        anchor: of the element of a page that has the details.
    """

    name: str
    kind: Kind
    x: float
    y: float
    lo: float
    hi: float
    on_front: bool
    recommended: bool
    details: tuple[str, ...]
    anchor: str


@dataclass(frozen=True)
class Picture:
    """Everything that is drawn.

    Attributes:
        points: report rows on the report text.
        stairs: corners of the front, from fewest bytes on.
        trials: completed trials on the search text, which is another text.
        ppl_full: PPL of the full cache on the report text; None without such a row.
        x_ticks: bytes and label, at round numbers of fp16 slots.
        y_range: limits of the report panel; points above are drawn at its edge.
        trial_range: the same for the panel of trials.
        placed: where rows of fewer tokens stand, in words; empty without any.
        words: of a text, or of prompts.
        curves: policies at several sizes, with their kind.
    """

    points: tuple[Point, ...]
    stairs: tuple[tuple[float, float], ...]
    trials: tuple[Point, ...]
    ppl_full: float | None
    budget_bytes: int
    budget_label: str
    x_range: tuple[float, float]
    x_ticks: tuple[tuple[float, str], ...]
    y_range: tuple[float, float]
    trial_range: tuple[float, float]
    model: str
    report_text: str
    search_text: str
    tokens: str
    placed: str
    words: Words
    curves: tuple[tuple[Kind, Curve], ...] = ()

    def at_budget(self) -> tuple[Point, ...]:
        """Rows that use most of the budget, and the recommended one; least loss first."""
        low, high = NEAR * self.budget_bytes, self.budget_bytes
        rows = [p for p in self.points if p.recommended or low <= p.x <= high]
        return tuple(sorted(rows, key=lambda p: p.y))

    @property
    def loss(self) -> str:
        """The loss over the full cache, with its unit, for an axis."""
        return f"{self.words.loss} to the full cache ({self.words.unit})"

    @property
    def note(self) -> str:
        """What a bar of the comparison means that has one end only; empty without such a row."""
        one_sided = any(p.lo < p.y == p.hi for p in self.at_budget())
        return "one-sided: at least so far behind" if one_sided else ""

    @property
    def beyond(self) -> tuple[Point, ...]:
        """Rows whose loss is above the panel."""
        return tuple(p for p in self.points if p.y > self.y_range[1])


def picture(summary: Summary, shape: ModelShape) -> Picture:
    """Compute the picture of a summary on a model of `shape`."""
    unit = shape.budget_bytes(1)
    best = next((r.dnll_full.mean for r in summary.rows if r.name == summary.recommended), 0.0)
    words = words_of(summary)
    points = tuple(
        _point(
            facts.as_planned(r, summary), f"policy-{i}", r.name == summary.recommended, best, words
        )
        for i, r in enumerate(summary.rows)
    )
    trials = tuple(
        _trial_point(t, unit, words)
        for t in summary.trials
        if t.state == "complete" and t.dnll is not None and t.bytes_peak
    )
    full = next((r for r in summary.rows if r.kind == "full"), None)
    kinds = {p.name: p.kind for p in points}
    sized = [(float(x), y) for c in summary.curves for x, y in c.points]
    xs = [p.x for p in points + trials] + [float(max(1, summary.budget_bytes))]
    xs += [x for x, _ in sized]
    x_range = (min(xs) / 1.25, max(xs) * 1.3)
    slots = summary.budget_bytes / unit
    return Picture(
        points=points,
        stairs=staircase([(p.x, p.y) for p in points]),
        trials=trials,
        ppl_full=None if full is None or summary.settings.see is not None else full.ppl,
        budget_bytes=summary.budget_bytes,
        budget_label=f"budget {bytes_text(summary.budget_bytes)} = {slots:,.4g} slots",
        x_range=x_range,
        x_ticks=_x_ticks(x_range, unit),
        y_range=_y_range(
            [p.y for p in points] + [p.lo for p in points if p.recommended],
            [p.y for p in points] + [y for _, y in sized],
        ),
        trial_range=_y_range([p.y for p in trials], [p.y for p in trials]),
        model=summary.model.name,
        report_text=facts.text_name(summary),
        search_text=facts.text_name(summary, "search"),
        tokens=facts.scored_tokens(summary),
        placed=facts.placed(summary),
        words=words,
        curves=tuple((kinds[c.name], c) for c in summary.curves if c.name in kinds),
    )


def staircase(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Corners of the non-dominated boundary: right along each point's loss, then down."""
    corners: list[tuple[float, float]] = []
    for i in front(points):
        x, y = points[i]
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return tuple(corners)


def nice_steps(lo: float, hi: float, most: int) -> list[float]:
    """At most `most` round numbers from `lo` to `hi`, 1, 2 or 5 times a power of ten apart."""
    span = max(hi - lo, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(m * power for m in (1, 2, 5, 10, 20) if span / (m * power) <= most - 1)
    return [i * step for i in range(math.ceil(lo / step), math.floor(hi / step) + 1)]


def ppl_ticks(info: Picture) -> list[tuple[float, str]]:
    """Round PPL values as (dNLL, label) inside the report panel."""
    if info.ppl_full is None:
        return []
    lo, hi = (info.ppl_full * math.exp(y) for y in info.y_range)
    return [(math.log(v / info.ppl_full), f"{v:.4g}") for v in nice_steps(lo, hi, 7) if v > 0]


def _point(row: Row, anchor: str, recommended: bool, best: float, words: Words) -> Point:
    """The mark of a row; `best` is the recommended policy's loss over the full cache."""
    against = "no other published method is as small"
    if row.dnll_best is not None and row.best != row.name:
        against = (
            f"{words.loss} to {row.best} {interval_text(row.dnll_best)} {words.unit}: "
            f"{verdict(row.dnll_best)}"
        )
    details = (
        row.name,
        f"{words.level} {' '.join(words.level_of(row))}, n = {row.tokens:,} {words.count}",
        f"{words.loss} to full {interval_text(row.dnll_full)} {words.unit}",
        *([] if row.stopped is None else [at_least(row)]),
        against,
        f"{bytes_text(row.bytes_peak)} per sequence, peak = {row.slots16:,.4g} fp16 slots a layer",
        describe(row.policy),
        compact_json(row.policy),
    )
    d = row.dnll_full
    if row.stopped is not None:
        d = Interval(d.mean, min(best + row.stopped.lo, d.mean), d.mean)
    return Point(
        row.name,
        row.kind,
        float(row.bytes_peak),
        d.mean,
        d.lo,
        d.hi,
        row.on_front,
        recommended,
        details,
        anchor,
    )


def _trial_point(trial: Trial, unit: int, words: Words) -> Point:
    assert trial.dnll is not None and trial.bytes_peak is not None
    details = (
        f"{trial.name}, on the search {words.material}",
        f"{words.loss} to full {signed(trial.dnll)} {words.unit}, no interval",
        f"{bytes_text(trial.bytes_peak)} per sequence = {trial.bytes_peak / unit:,.4g} fp16 slots",
        describe(trial.policy),
        compact_json(trial.policy),
    )
    y, x, anchor = trial.dnll, float(trial.bytes_peak), f"trial-{trial.number}"
    return Point(trial.name, trial.kind, x, y, y, y, False, False, details, anchor)


def _x_ticks(x_range: tuple[float, float], unit: int) -> tuple[tuple[float, str], ...]:
    lo, hi = x_range[0] / unit, x_range[1] / unit
    powers = [2.0**k for k in range(math.floor(math.log2(lo)), math.ceil(math.log2(hi)) + 1)]
    inside = [s for s in powers if lo <= s <= hi]
    if len(inside) < 3:
        inside = [s for s in nice_steps(lo, hi, 5) if s > 0]
    while len(inside) > 8:
        inside = inside[::-1][::2][::-1]
    return tuple((s * unit, f"{s:,.4g} slots\n{bytes_text(s * unit)}") for s in inside)


def _y_range(lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Limits that fit most points; a few very large losses would compress all others."""
    finite = sorted(h for h in highs if math.isfinite(h) and h > 0)
    if not finite:
        return (-0.05, 0.5)
    top = max(0.02, 1.3 * finite[int(0.75 * (len(finite) - 1))])
    if finite[-1] <= 1.6 * top:
        top = max(top, 1.08 * finite[-1])
    low = min([0.0, *(v for v in lows if math.isfinite(v))])
    return (low - 0.08 * (top - low), top)
