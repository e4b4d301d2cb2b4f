"""The Pareto picture drawn by matplotlib, wide for `pareto.png` and narrow for phones."""

from itertools import pairwise
from typing import Any

from kvsearch.report.comparison_png import draw_comparison, inches
from kvsearch.report.figure import (
    COLOUR,
    FAINT,
    GREY,
    INK,
    KINDS,
    LABEL,
    MARK,
    bare,
    new_figure,
    png,
)
from kvsearch.report.labels import Box, gap, place
from kvsearch.report.pareto_plot import Picture, Point, ppl_ticks
from kvsearch.report.tables import signed

WIDE, NARROW = (14.2, 7.0), (4.3, 6.7)  # inches; a narrow one grows with the rows compared


def draw_png(info: Picture, *, narrow: bool = False) -> bytes:
    """PNG bytes of the picture: report rows, search trials below, the comparison at the budget.

    Args:
        info: what to draw.
        narrow: for a screen of about 400 px, with larger type and fewer names.
    """
    from matplotlib import rc_context

    with rc_context(
        {"font.size": 8.5 if narrow else 9.5, "axes.labelcolor": INK, "text.color": INK}
    ):
        figure, top, low, beside = _panels(info, narrow)
        draw_comparison(info, beside)
        _frame(info, top, low, narrow)
        obstacles = _report_panel(info, top, narrow)
        _trial_panel(info, low, narrow)
        _legend(info, figure, narrow)
        figure.canvas.draw()  # positions are final only after the layout has run
        _name_points(info, figure, top, obstacles, narrow)
        return png(figure)


def _panels(info: Picture, narrow: bool) -> tuple[Any, Any, Any, Any]:
    """Figure, panels of rows and trials on the same bytes axis, and that of the comparison."""
    if narrow:
        width, least = NARROW
        below = 0.65 if info.note else 0.45
        more = inches(info) + 0.55 + below
        height = least + more
        figure = new_figure(width, height)
        up = more / height  # of the comparison, below the other two
        place = {
            "left": 0.15,
            "right": 0.855,
            "top": 1 - 1.0 / height,
            "bottom": up + 0.75 / height,
        }
        under = {"left": 0.3, "right": 0.855, "top": up - 0.35 / height, "bottom": below / height}
    else:
        figure = new_figure(*WIDE)
        place = {"left": 0.055, "right": 0.635, "top": 0.915, "bottom": 0.095}
        high = max(0.1, min(0.82, (inches(info) + 0.1) / WIDE[1]))
        under = {"left": 0.77, "right": 0.952, "top": 0.915, "bottom": 0.915 - high}
    two = figure.add_gridspec(2, 1, height_ratios=(3.1, 1.0), hspace=0.16, **place)
    low = figure.add_subplot(two[1])
    top = figure.add_subplot(two[0], sharex=low)
    return figure, top, low, figure.add_subplot(figure.add_gridspec(1, 1, **under)[0])


def _frame(info: Picture, top: Any, low: Any, narrow: bool) -> None:
    """Axes, ticks, the budget and the full cache."""
    for axes in (top, low):
        bare(axes)
        axes.set_xscale("log")
        axes.set_xlim(*info.x_range)
        axes.axhline(0, color="black", lw=0.9, ls=(0, (6, 3)), zorder=1)
        axes.axvline(info.budget_bytes, color=GREY, lw=1, zorder=1)
        axes.axvspan(info.budget_bytes, info.x_range[1], color=FAINT, alpha=0.35, lw=0, zorder=0)
    top.set_ylim(*info.y_range)
    low.set_ylim(*info.trial_range)
    ticks = info.x_ticks[::-1][::2][::-1] if narrow and len(info.x_ticks) > 4 else info.x_ticks
    low.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    low.minorticks_off()
    top.tick_params(axis="x", labelbottom=False)
    unit = "" if narrow else ", in fp16-equivalent slots per layer and in bytes"
    low.set_xlabel(f"KV cache per sequence, peak{unit}")
    w = info.words
    top.set_ylabel(w.above)
    low.set_ylabel(f"{w.loss}, search {w.material}")
    if marks := ppl_ticks(info, 7):
        right = top.secondary_yaxis("right")
        right.set_yticks([y for y, _ in marks], [label for _, label in marks])
        right.set_ylabel("PPL on the report text")
        right.spines["right"].set_visible(False)
        right.tick_params(colors=GREY, labelcolor=INK, length=3, width=0.7)
    title = (
        f"Report {w.material} {info.report_text}, n = {info.tokens} {w.count}; bars are 95 % "
        "intervals"
    )
    top.set_title(
        f"n = {info.tokens} {w.count}; bars are 95 %" if narrow else title,
        loc="left",
        fontsize=8 if narrow else 10,
        color=INK,
    )


def _report_panel(
    info: Picture, axes: Any, narrow: bool
) -> list[tuple[float, float, float, float]]:
    """Front and rows; returns data boxes that names must not cover."""
    boxes: list[tuple[float, float, float, float]] = []
    if info.stairs:
        line = [
            (info.stairs[0][0], info.y_range[1]),
            *info.stairs,
            (info.x_range[1], info.stairs[-1][1]),
        ]
        axes.plot(
            [x for x, _ in line],
            [y for _, y in line],
            color=INK,
            lw=1.3,
            alpha=0.5,
            zorder=2,
            solid_joinstyle="miter",
        )
        for (xa, ya), (xb, yb) in pairwise(line):
            boxes.append((min(xa, xb), min(ya, yb), max(xa, xb), max(ya, yb)))
    for kind, curve in info.curves:
        axes.plot(
            [x for x, _ in curve.points], [y for _, y in curve.points], color=COLOUR[kind], lw=1.4,
            marker=".", ms=6, zorder=2.5,
        )  # fmt: skip
        for (xa, ya), (xb, yb) in pairwise(curve.points):
            boxes.append((xa, min(ya, yb), xb, max(ya, yb)))
    (bottom, edge), compared = info.y_range, info.at_budget()  # their bars are in the other panel
    for p in info.points:
        beyond = p.y > edge
        colour, size = COLOUR[p.kind], {"full": 13, "searched": 7}.get(p.kind, 7.5)
        if not beyond and (p.on_front or p not in compared):
            axes.errorbar(
                [p.x],
                [p.y],
                [[p.y - p.lo], [p.hi - p.y]],
                color=colour,
                lw=1.1,
                capsize=2,
                alpha=0.8,
                zorder=3,
            )
            boxes.append((p.x, p.lo, p.x, p.hi))
            cut = [y for y, out in ((edge, p.hi > edge), (bottom, p.lo < bottom)) if out]
            axes.plot([p.x] * len(cut), cut, "x", ms=5, mec=colour, zorder=3, clip_on=False)
        if p.recommended:
            axes.plot(p.x, min(p.y, edge), "o", ms=17, mfc="none", mec=INK, mew=1.3, zorder=4)
        axes.plot(
            p.x,
            min(p.y, edge),
            "^" if beyond else MARK[p.kind],
            ms=size,
            mec=colour,
            mfc=colour if p.on_front else "white",
            mew=1.4,
            zorder=5,
            clip_on=False,
        )
    label = info.budget_label.partition(" =")[0] if narrow else info.budget_label
    axes.annotate(
        label,
        (info.budget_bytes, 0),
        xycoords="data",
        xytext=(4, -3),
        textcoords="offset points",
        va="top",
        fontsize="small",
        color=GREY,
    )
    boxes.append((info.x_range[0], 0.0, info.x_range[1], 0.0))
    return boxes


def _trial_panel(info: Picture, axes: Any, narrow: bool) -> None:
    edge = info.trial_range[1]
    for kind in KINDS:
        mine = [t for t in info.trials if t.kind == kind]
        axes.plot(
            [t.x for t in mine],
            [min(t.y, edge) for t in mine],
            MARK[kind],
            ms=4.5,
            color=COLOUR[kind],
            alpha=0.35,
            mew=0,
            clip_on=False,
        )
    above = sum(t.y > edge for t in info.trials)
    other = f"other {info.words.material}, no intervals"
    note = f"{len(info.trials)} completed trials on {info.search_text}: {other}"
    if narrow:
        note = f"{len(info.trials)} trials, {other}"
    if above:
        note += f"; {above} above, at the edge"
    axes.set_title(note, loc="left", fontsize=8 if narrow else 9, color=GREY)


def _legend(info: Picture, figure: Any, narrow: bool) -> None:
    from matplotlib.lines import Line2D

    kinds = [k for k in KINDS if any(p.kind == k for p in info.points)]
    marks = [
        Line2D(
            [],
            [],
            ls="",
            marker=MARK[k],
            ms=10 if k == "full" else 7,
            color=COLOUR[k],
            label=LABEL[k],
        )
        for k in kinds
    ]
    marks.append(
        Line2D(
            [],
            [],
            ls="",
            marker="o",
            ms=7,
            mfc="white",
            mec=GREY,
            mew=1.4,
            label="hollow: not on the front",
        )
    )
    marks.append(Line2D([], [], color=INK, lw=1.3, alpha=0.5, label="front"))
    if any(p.recommended for p in info.points):
        marks.append(
            Line2D(
                [], [], ls="", marker="o", ms=13, mfc="none", mec=INK, mew=1.3, label="recommended"
            )
        )
    figure.legend(
        handles=marks,
        loc="upper left",
        ncols=2 if narrow else len(marks),
        frameon=False,
        fontsize="small",
        handletextpad=0.5,
        columnspacing=1.4,
    )


def _name_points(
    info: Picture,
    figure: Any,
    axes: Any,
    data_boxes: list[tuple[float, float, float, float]],
    narrow: bool,
) -> None:
    """Write names where there is room, the recommended first; drop those that find none."""
    from matplotlib.patheffects import withStroke

    compared = info.at_budget()  # but for the recommended one, these are named in the other panel
    named = sorted(
        (
            p
            for p in info.points
            if p.recommended
            or p.kind == "full"
            or (p not in compared and (p.on_front or not narrow))
        ),
        key=lambda p: (not p.recommended, not p.on_front, p.y),
    )
    edge, pixel = info.y_range[1], figure.dpi / 72
    renderer, to_pixels = figure.canvas.get_renderer(), axes.transData.transform
    halo = [withStroke(linewidth=2.5, foreground="white")]
    texts = [
        axes.text(
            0,
            0,
            _label(p, edge),
            fontsize="small",
            zorder=6,
            path_effects=halo,
            fontweight="bold" if p.recommended else "normal",
        )
        for p in named
    ]
    extents = [t.get_window_extent(renderer) for t in texts]
    sizes = [(e.width + 2 * pixel, e.height) for e in extents]
    anchors = [tuple(to_pixels((p.x, min(p.y, edge)))) for p in named]
    blocked: list[Box] = []
    for x0, y0, x1, y1 in data_boxes:
        (left, bottom), (right, top) = to_pixels((x0, y0)), to_pixels((x1, min(y1, edge)))
        blocked.append((left - pixel, bottom - pixel, right + pixel, top + pixel))
    for p in info.points:
        x, y = to_pixels((p.x, min(p.y, edge)))
        half = (10 if p.recommended else 5) * pixel  # of its ring, too
        blocked.append((x - half, y - half, x + half, y + half))
    frame = axes.get_window_extent(renderer)
    bounds = (frame.x0, to_pixels((1, 0))[1], frame.x1, frame.y1)  # below 0 stand the line's names
    places = place(anchors, sizes, blocked, bounds, 8 * pixel)
    for p, text, anchor, box in zip(named, texts, anchors, places, strict=True):
        far = box is not None and gap(box, anchor) > 14 * pixel
        if box is None or (far and narrow):
            text.remove()
            continue
        x, y = axes.transData.inverted().transform((box[0] + pixel, box[1]))
        text.set(position=(x, y), va="bottom", color=COLOUR[p.kind])
        if far:
            _leader(axes, anchor, box, COLOUR[p.kind])


def _label(p: Point, edge: float) -> str:
    return f"{p.name}: {signed(p.y, 2)}, above" if p.y > edge else p.name


def _leader(axes: Any, anchor: tuple[float, float], box: Box, colour: str) -> None:
    end = (min(max(anchor[0], box[0]), box[2]), min(max(anchor[1], box[1]), box[3]))
    back = axes.transData.inverted().transform
    (xa, ya), (xb, yb) = back(anchor), back(end)
    axes.plot([xa, xb], [ya, yb], color=colour, lw=0.6, alpha=0.6, zorder=2)
