"""The Pareto picture as a figure, wide for `pareto.png` and pages, and narrow for phones."""

from itertools import pairwise
from typing import Any

from kvsearch.report.comparison_panel import LEAST, LONGEST, MOST, draw_comparison, draw_mark
from kvsearch.report.figure import (
    COLOUR,
    FAINT,
    GREY,
    INK,
    KINDS,
    LABEL,
    MARK,
    bare,
    cut,
    new_figure,
    note,
    style,
)
from kvsearch.report.labels import Box, gap, place
from kvsearch.report.pareto_plot import Picture, Point, ppl_ticks
from kvsearch.report.tables import signed

SIZES = (0, (4, 1.5))  # a dashed line: its points are on fewer tokens than the marks
WIDE, NARROW = (13.4, 6.6), (4.3, 5.3)  # inches; a narrow one grows with what is below


def draw(info: Picture, *, narrow: bool = False) -> Any:
    """The figure: report rows, search trials below, the comparison at the budget.

    Args:
        info: what to draw.
        narrow: for a screen of about 400 px, with larger type and fewer names.
    """
    with style(8.5 if narrow else 10):
        figure, top, low, beside = _panels(info, narrow)
        draw_comparison(info, beside)
        _frame(info, top, low, narrow)
        obstacles = _report_panel(info, top)
        if low is not None:
            _trial_panel(info, low, narrow)
        _legend(info, figure, narrow)
        figure.canvas.draw()  # positions are final only after the layout has run
        _name_points(info, figure, top, obstacles, narrow)
    return figure


def _panels(info: Picture, narrow: bool) -> tuple[Any, Any, Any, Any]:
    """Figure, panels of rows and of trials (or None), and that of the comparison."""
    rows, searched = max(1, len(info.at_budget())), any(t.kind == "searched" for t in info.trials)
    trials = 1.4 if searched else 0.0  # all others are rows, too
    longest = max((min(LONGEST, len(p.name)) for p in info.at_budget()), default=1)
    names = (0.075 if narrow else 0.088) * (longest + 2)  # inches
    if narrow:
        width, least = NARROW
        more = LEAST * rows + (1.2 if info.note else 1.0)  # of the comparison, below the others
        height = least + trials + more
        up = more / height
        left = min(0.45, max(0.15, names / width))
        panels = {"left": 0.15, "right": 0.855, "top": 1 - 1.0 / height,
                  "bottom": up + 0.75 / height}  # fmt: skip
        under = {"left": left, "right": 0.855, "top": up - 0.35 / height,
                 "bottom": (0.65 if info.note else 0.45) / height}  # fmt: skip
    else:
        width, height = WIDE
        panels = {"left": 0.062, "right": 0.61, "top": 0.905, "bottom": 0.105}
        inches = min(0.8 * height, max(0.6, rows * max(LEAST, min(MOST, 4 / rows))))
        under = {"left": min(0.85, 0.675 + names / width), "right": 0.945, "top": 0.905,
                 "bottom": 0.905 - inches / height}  # fmt: skip
    figure = new_figure(width, height)
    beside = figure.add_subplot(figure.add_gridspec(1, 1, **under)[0])
    if not trials:
        return figure, figure.add_subplot(figure.add_gridspec(1, 1, **panels)[0]), None, beside
    two = figure.add_gridspec(2, 1, height_ratios=(3.4, 1.0), hspace=0.18, **panels)
    low = figure.add_subplot(two[1])
    return figure, figure.add_subplot(two[0], sharex=low), low, beside


def _frame(info: Picture, top: Any, low: Any, narrow: bool) -> None:
    """Axes, ticks, the budget and the full cache; `low` is None without trials."""
    for axes in filter(None, (top, low)):
        bare(axes)
        axes.set_xscale("log")
        axes.set_xlim(*info.x_range)
        axes.axhline(0, color="black", lw=0.9, ls=(0, (6, 3)), zorder=1)
        axes.axvline(info.budget_bytes, color=GREY, lw=1, zorder=1)
        axes.axvspan(info.budget_bytes, info.x_range[1], color=FAINT, alpha=0.35, lw=0, zorder=0)
    top.set_ylim(*info.y_range)
    ticks = info.x_ticks[::-1][::2][::-1] if narrow and len(info.x_ticks) > 4 else info.x_ticks
    lowest = top if low is None else low
    lowest.set_xticks([x for x, _ in ticks], [label for _, label in ticks])
    lowest.minorticks_off()
    w = info.words
    if low is not None:
        low.set_ylim(*info.trial_range)
        low.set_ylabel(f"{w.loss}, search", fontsize="small")
        top.minorticks_off()
        top.tick_params(axis="x", labelbottom=False)
    unit = "" if narrow else ", in fp16-equivalent slots per layer and in bytes"
    lowest.set_xlabel(f"KV cache per sequence, peak{unit}")
    top.set_ylabel(w.above)
    if marks := ppl_ticks(info):
        right = top.secondary_yaxis("right")
        right.set_yticks([y for y, _ in marks], [label for _, label in marks])
        right.set_ylabel("PPL on the report text")
        right.spines["right"].set_visible(False)
        right.tick_params(colors=GREY, labelcolor=INK, length=3, width=0.7)
    size, bars = f"n = {info.tokens} {w.count}", "bars are 95 % intervals"
    title = top.set_title(
        f"{size}; bars are 95 %" if narrow else f"{size}; {bars}; {info.report_text}",
        loc="left",
        fontsize=8 if narrow else "medium",
        color=INK,
    )
    cut(title, (1.1 if narrow else 1.07) * top.get_window_extent().width)


def _report_panel(info: Picture, axes: Any) -> list[Box]:
    """Front and rows; returns data boxes that names must not cover."""
    boxes: list[Box] = []
    (bottom, edge), compared = info.y_range, info.at_budget()  # their bars are in the other panel
    if info.stairs:
        (x0, y0), (_, last) = info.stairs[0], info.stairs[-1]
        line = [(x0, max(edge, y0)), *info.stairs, (info.x_range[1], last)]
        axes.plot(
            *zip(*line, strict=True), color=INK, lw=1.3, alpha=0.5, zorder=2,
            solid_joinstyle="miter",
        )  # fmt: skip
        for (xa, ya), (xb, yb) in pairwise(line):
            boxes.append((min(xa, xb), min(ya, yb), max(xa, xb), max(ya, yb)))
    for kind, curve in info.curves:
        axes.plot(
            *zip(*curve.points, strict=True), color=COLOUR[kind], lw=1.4, ls=SIZES, marker=".",
            ms=6, zorder=2.5,
        )  # fmt: skip
        for (xa, ya), (xb, yb) in pairwise(curve.points):
            boxes.append((xa, min(ya, yb), xb, max(ya, yb)))
    for p in info.points:
        beyond = p.y > edge
        colour, size = COLOUR[p.kind], {"full": 13, "searched": 7}.get(p.kind, 7.5)
        if not beyond and (p.recommended or p not in compared) and p.lo < p.hi:
            ends = max(p.lo, bottom), min(p.hi, edge)
            axes.plot([p.x, p.x], ends, color=colour, lw=1.1, alpha=0.8, zorder=3)
            for at, end, mark in ((p.lo, bottom, "v"), (p.hi, edge, "^")):
                out = not bottom <= at <= edge
                axes.plot(p.x, end if out else at, mark if out else "_", ms=4, color=colour,
                          zorder=3, clip_on=False)  # fmt: skip
            boxes.append((p.x, p.lo, p.x, p.hi))
        if p.recommended:
            axes.plot(p.x, min(p.y, edge), "o", ms=17, mfc="none", mec=INK, mew=1.3, zorder=4)
        mark = "^" if beyond else MARK[p.kind]
        draw_mark(axes, p, (p.x, min(p.y, edge)), mark, ms=size, mew=1.4, zorder=5)
    boxes.append((info.x_range[0], 0.0, info.x_range[1], 0.0))
    return boxes


def _trial_panel(info: Picture, axes: Any, narrow: bool) -> None:
    edge = info.trial_range[1]
    for t in info.trials:
        axes.plot(
            t.x, min(t.y, edge), MARK[t.kind], ms=4.5, color=COLOUR[t.kind], alpha=0.4, mew=0,
            clip_on=False, url=f"#{t.anchor}",
        )  # fmt: skip
    above = sum(t.y > edge for t in info.trials)
    edged = f"; {above} above, at the edge" * (above > 0)
    note = f"{len(info.trials)} trials on the search {info.words.material}, no intervals{edged}"
    if not narrow:
        note += f"; {info.search_text}"
    title = axes.set_title(note, loc="left", fontsize="small", color=GREY)
    cut(title, (1.1 if narrow else 1.07) * axes.get_window_extent().width)


def _legend(info: Picture, figure: Any, narrow: bool) -> None:
    from matplotlib.lines import Line2D

    def key(label: str, marker: str | None = None, **how: Any) -> Any:
        style = {"ls": ""} if marker else {"lw": 1.4}
        return Line2D([], [], label=label, marker=marker, **{"ms": 7, **style, **how})

    kinds = [k for k in KINDS if any(p.kind == k for p in info.points)]
    keys = [key(LABEL[k], MARK[k], ms=10 if k == "full" else 7, color=COLOUR[k]) for k in kinds]
    if any(p.recommended for p in info.points):
        keys.append(key("recommended", "o", ms=13, mfc="none", mec=INK, mew=1.3))
    if not all(p.on_front for p in info.points):
        keys.append(key("hollow: not on the front", "o", mfc="white", mec=GREY, mew=1.4))
    keys.append(key("front", color=INK, alpha=0.5))
    if info.curves:
        short = narrow or len(keys) > 7  # beside that many there is no room for all of it
        sizes = "sizes, first window" if short else "the same policy at several sizes, first window"
        keys.append(key(sizes, ".", ls=SIZES, lw=1.4, color=GREY))
    figure.legend(
        handles=keys,
        loc="upper left",
        ncols=2 if narrow else len(keys),
        frameon=False,
        fontsize="small",
        handletextpad=0.5,
        columnspacing=1.2,
    )


def _name_points(
    info: Picture, figure: Any, axes: Any, data_boxes: list[Box], narrow: bool
) -> None:
    """Write names where there is room, the recommended first; drop those that find none."""
    from matplotlib.patheffects import withStroke

    compared = info.at_budget()  # but for the recommended one, these are named in the other panel
    edge, pixel = info.y_range[1], figure.dpi / 72
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
    marks = [(_label(p, edge), p.x, min(p.y, edge), p.kind, p.recommended) for p in named]
    for kind, curve in info.curves:
        inside = [(x, y) for x, y in curve.points if y <= edge]
        if inside and not (narrow and curve.name in {p.name for p in named}):
            at = inside[0] if curve.name in {p.name for p in named} else inside[-1]
            many = "" if narrow else f" at {len(curve.points)} sizes"
            marks.append((f"{curve.name}{many}", *at, kind, False))
    renderer, to_pixels = figure.canvas.get_renderer(), axes.transData.transform
    halo = [withStroke(linewidth=2.5, foreground="white")]
    frame = axes.get_window_extent(renderer)
    budget = _budget(info, axes, frame.width, narrow).get_window_extent(renderer)
    texts = [
        axes.text(
            0,
            0,
            label,
            fontsize="small",
            zorder=6,
            path_effects=halo,
            color=COLOUR[kind],
            fontweight="bold" if bold else "normal",
        )
        for label, _, _, kind, bold in marks
    ]
    extents = [t.get_window_extent(renderer) for t in texts]
    sizes = [(e.width + 2 * pixel, e.height) for e in extents]
    anchors = [tuple(to_pixels((x, y))) for _, x, y, *_ in marks]
    blocked: list[Box] = [(budget.x0, budget.y0, budget.x1, budget.y1)]
    for x0, y0, x1, y1 in data_boxes:
        (left, bottom), (right, top) = to_pixels((x0, y0)), to_pixels((x1, min(y1, edge)))
        blocked.append((left - pixel, bottom - pixel, right + pixel, top + pixel))
    for p in info.points:
        x, y = to_pixels((p.x, min(p.y, edge)))
        half = (10 if p.recommended else 5) * pixel  # of its ring, too
        blocked.append((x - half, y - half, x + half, y + half))
    bounds = (frame.x0, frame.y0, frame.x1, frame.y1)
    places = place(anchors, sizes, blocked, bounds, 8 * pixel)
    for text, anchor, box in zip(texts, anchors, places, strict=True):
        far = box is not None and gap(box, anchor) > 14 * pixel
        if box is None or (far and narrow):
            text.remove()
            continue
        x, y = axes.transData.inverted().transform((box[0] + pixel, box[1]))
        text.set(position=(x, y), va="bottom")
        if far:
            _leader(axes, anchor, box, text.get_color())


def _budget(info: Picture, axes: Any, width: float, narrow: bool) -> Any:
    """Name of the budget's line at the bottom, on the side that has room."""
    label = info.budget_label.partition(" =")[0] if narrow else info.budget_label
    where = ("data", "axes fraction")
    text = note(axes, label, (info.budget_bytes, 0), (4, 2), xycoords=where, va="bottom")
    extent = text.get_window_extent(axes.figure.canvas.get_renderer())
    if extent.x1 > axes.get_window_extent().x0 + width:
        text.set(ha="right", position=(-4, 2))
    return text


def _label(p: Point, edge: float) -> str:
    return f"{p.name}: {signed(p.y, 2)}, above" if p.y > edge else p.name


def _leader(axes: Any, anchor: tuple[float, float], box: Box, colour: str) -> None:
    end = (min(max(anchor[0], box[0]), box[2]), min(max(anchor[1], box[1]), box[3]))
    back = axes.transData.inverted().transform
    (xa, ya), (xb, yb) = back(anchor), back(end)
    axes.plot([xa, xb], [ya, yb], color=colour, lw=0.6, alpha=0.6, zorder=2)
