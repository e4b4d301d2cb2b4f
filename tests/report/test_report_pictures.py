"""Pictures of the report of a hand-made summary: what is drawn, and where names stand."""

from dataclasses import replace

import numpy as np
import pytest

from kvsearch.policy import layout
from kvsearch.report.labels import place
from kvsearch.report.pareto_figure import draw
from kvsearch.report.pareto_plot import Picture, picture
from kvsearch.report.slotmap import AgeMap, SlotBars, slot_map
from kvsearch.results.records import Interval
from tests.report_cases import CONTEXT, POLICIES, SHAPE, asked, make_summary

PICTURES = True  # are drawn: see conftest.py


def test_staircase_runs_through_the_rows_that_nothing_dominates():
    summary = make_summary()
    info = picture(summary, SHAPE)
    free = {
        (float(r.bytes_peak), r.dnll_full.mean)
        for r in summary.rows
        if not any(
            o.bytes_peak <= r.bytes_peak and o.nll <= r.nll and o is not r for o in summary.rows
        )
    }
    assert free < set(info.stairs)
    for (xa, ya), (xb, yb) in zip(info.stairs, info.stairs[1:], strict=False):
        assert (xb > xa and yb == ya) or (xb == xa and yb < ya)
    assert len(info.trials) == 33
    assert {p.name for p in info.beyond} == {"window 256", "xmu <60/40>"}


def test_every_row_at_the_budget_is_compared_by_name():
    """One column of marks at the budget cannot be read; the sorted rows beside it can."""
    summary = make_summary()
    info = picture(summary, SHAPE)
    rows = info.at_budget()
    asked = [
        r for r in summary.rows
        if 0.9 * summary.budget_bytes <= r.bytes_peak <= summary.budget_bytes
        or r.name == summary.recommended
    ]  # fmt: skip
    assert [p.name for p in rows] == [r.name for r in sorted(asked, key=lambda r: r.dnll_full.mean)]
    assert len(rows) > 5
    beside, *_ = draw(info).axes
    assert [label.get_text() for label in beside.get_yticklabels()] == [p.name for p in rows]
    links = [line.get_url() for line in beside.lines if line.get_url()]
    assert links == [f"#{p.anchor}" for p in rows]


def test_a_row_that_was_stopped_is_drawn_from_where_it_is_at_least():
    summary = make_summary()
    best = summary.row("trial 31").dnll_full.mean
    at_budget = {p.name for p in picture(summary, SHAPE).at_budget()}
    last = max((r for r in summary.rows if r.name in at_budget), key=lambda r: r.dnll_full.mean)
    far = replace(last, stopped=Interval(0.03, 0.02, 0.04))
    rows = [far if r is last else r for r in summary.rows]
    info = picture(replace(summary, rows=rows), SHAPE)
    (drawn,) = (p for p in info.points if p.name == far.name)
    assert (drawn.lo, drawn.y, drawn.hi) == (best + 0.02, far.dnll_full.mean, far.dnll_full.mean)
    assert any("at least 0.020 behind" in line for line in drawn.details)
    assert "at least" in info.note and not picture(summary, SHAPE).note


def test_slot_map_shows_tiers_and_shares():
    ages = slot_map(POLICIES["trial 9"], SHAPE, CONTEXT)
    assert isinstance(ages, AgeMap) and ages.legend == {1: "16 bit", 2: "K4 V4"}
    assert (ages.codes[:, :4] == 1).all() and (ages.codes[:, -7:] == 1).all()
    limits = [layer.slots for layer in layout(POLICIES["trial 9"], SHAPE).layers]
    assert ((ages.codes > 0).sum(axis=1) <= limits).all()
    bars = slot_map(POLICIES["trial 31"], SHAPE, CONTEXT)
    assert isinstance(bars, SlotBars)
    limits = [layer.slots for layer in layout(POLICIES["trial 31"], SHAPE).layers]
    assert [sum(s.count for s in bar) for bar in bars.layers] == limits
    assert [s.role for s in bars.layers[0]] == [
        "sinks",
        "chosen by rank",
        "recent window",
        "newest",
    ]


def test_labels_keep_apart_and_inside():
    rng = np.random.default_rng(3)
    anchors = [tuple(p) for p in rng.uniform(100, 500, (25, 2))]
    marks = [(x - 4, y - 4, x + 4, y + 4) for x, y in anchors]
    boxes = [b for b in place(anchors, [(60, 10)] * 25, marks, (0, 0, 600, 600), 8) if b]
    assert len(boxes) >= 20
    for i, a in enumerate(boxes):
        assert min(a) >= 0 and max(a) <= 600
        for b in boxes[:i] + marks:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_names_at_the_budget_are_in_the_comparison_alone():
    """Three policies of one size had their names written over each other."""
    info = picture(make_summary(), SHAPE)
    best = next(p for p in info.points if p.recommended)
    twins = [replace(best, name=f"earlier-{i}", recommended=False) for i in range(3)]
    plain = replace(best, x=best.x / 2, name="smaller", recommended=False, on_front=True)
    alike = [replace(plain, name=f"as small {i}") for i in range(12)]
    crowded = replace(info, points=(*info.points, *twins, plain, *alike))
    _, *panels = draw(crowded).axes
    said = [text.get_text() for axes in panels for text in axes.texts]
    assert best.name in said and "smaller" in said
    assert not set(said) & {p.name for p in twins}


def overlaps(info: Picture, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of a picture that touch another text, or leave the picture."""
    from matplotlib.text import Text

    figure, drawn, plain = draw(info, narrow=narrow), dict[Text, None](), Text.draw
    monkeypatch.setattr(Text, "draw", lambda t, r: (drawn.update({t: None}), plain(t, r)))
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    found = [(t.get_text(), t.get_window_extent()) for t in drawn if t.get_text()]
    bad = [f"{s!r} leaves" for s, e in found
           if e.x0 < -1 or e.y0 < -1 or e.x1 > width + 1 or e.y1 > height + 1]  # fmt: skip
    for i, (said, a) in enumerate(found):
        for other, b in found[:i]:
            apart = max(a.x0 - b.x1, b.x0 - a.x1, a.y0 - b.y1, b.y0 - a.y1)
            bad += [f"{said!r} touches {other!r}"] if apart < -2 else []
    return bad


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("case", ["many", "one", "long", "far"])
def test_texts_of_a_picture_do_not_touch(
    case: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_summary()
    if case == "one":
        made = replace(made, rows=[made.row("trial 31")], trials=[])
    elif case == "long":
        made.rows[1] = replace(made.rows[1], name="a-policy-file-with-a-name-of-its-own-" * 2)
        made = replace(made, recommended=made.rows[1].name)
        name = "corpus/of/our/own/documents-2026-11.jsonl:0-900000" * 3
        long = made.text.report.model_copy(update={"name": name})
        made = asked(made, "text", report=long)
    elif case == "far":
        made = asked(made, "settings", budget_bytes=8 * made.budget_bytes)
    info = picture(made, SHAPE)
    assert not overlaps(info, narrow, monkeypatch)
    panels = len(draw(info, narrow=narrow).axes)
    assert panels == (2 if case == "one" else 3)


def test_the_budget_in_slots_is_that_of_a_model_without_some_channels() -> None:
    less = SHAPE.with_widths(((32, 32),) * SHAPE.layers)
    made = asked(make_summary(), "settings", budget_bytes=less.budget_bytes(256))
    assert picture(made, less).budget_label.endswith(" = 256 slots")


def test_bars_are_cut_and_marked_where_they_leave_the_axes() -> None:
    info = picture(make_summary(), SHAPE)
    low, high = info.y_range
    points = tuple(replace(p, lo=p.lo - 1, hi=p.hi + 1) for p in info.points)
    info = replace(info, points=points)
    wide = [p for p in info.at_budget() if p.y < high]
    assert len(wide) > 3
    beside, *_ = draw(info).axes
    for p in wide:
        row = info.at_budget().index(p)
        mine = [line for line in beside.lines if list(line.get_ydata())[:1] == [row]]
        marks = {line.get_marker(): line.get_xdata()[0] for line in mine}
        assert marks["<"] == low and marks[">"] == high
        assert all(low <= x <= high for line in mine for x in line.get_xdata())
