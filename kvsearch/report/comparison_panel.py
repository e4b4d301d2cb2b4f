"""The panel that compares policies of about the budget's bytes: one a row, least loss first."""

from typing import Any

from kvsearch.report.figure import COLOUR, FAINT, INK, MARK, bare, note
from kvsearch.report.pareto_plot import Picture, Point
from kvsearch.report.screen import shortened
from kvsearch.report.tables import signed

LEAST, MOST = 0.21, 0.36  # inches of one row
LONGEST = 24  # letters of a name


def draw_comparison(info: Picture, axes: Any) -> None:
    """Marks with intervals, names on the left and losses on the right.

    Args:
        info: what to draw.
        axes: an empty panel, at least `LEAST` inches a row high.
    """
    rows, (low, edge) = info.at_budget(), info.y_range
    bare(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, pad=6)
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_xlim(low, edge)
    axes.axvline(0, color="black", lw=0.9, ls=(0, (6, 3)), zorder=1)
    for i, p in enumerate(rows):
        beyond, colour = p.y > edge, COLOUR[p.kind]
        if p.recommended:
            axes.axhspan(i - 0.45, i + 0.45, color=FAINT, alpha=0.7, lw=0, zorder=0)
        if p.lo < edge and p.lo < p.hi:
            ends = max(p.lo, low), min(p.hi, edge)
            axes.plot(ends, [i, i], color=colour, lw=1.6, alpha=0.7, zorder=3)
            for at, mark in (*[(low, "<")] * (p.lo < low), *[(edge, ">")] * (p.hi > edge)):
                axes.plot(at, i, mark, ms=4, color=colour, zorder=3, clip_on=False)
        mark = ">" if beyond else MARK[p.kind]
        draw_mark(axes, p, (min(p.y, edge), i), mark, ms=6, mew=1.3, zorder=4)
        said, where = signed(p.y, 3 if abs(p.y) < 1 else 2), ("axes fraction", "data")
        note(axes, said, (1, i), (9, 0), xycoords=where, color=INK)
    names = [shortened(p.name, LONGEST) for p in rows]
    axes.set_yticks(range(len(rows)), names, fontsize="small")
    for label, p in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(COLOUR[p.kind])
        label.set_fontweight("bold" if p.recommended else "normal")
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("\n".join(filter(None, (info.loss, info.note))), loc="right")
    axes.set_title("At the budget, least loss first", loc="right", fontsize="medium", color=INK)


def draw_mark(axes: Any, p: Point, at: tuple[float, float], mark: str, **how: Any) -> None:
    """A policy's mark, filled on the front; on a page it is a link."""
    colour = COLOUR[p.kind]
    face = colour if p.on_front else "white"
    axes.plot(*at, mark, mec=colour, mfc=face, clip_on=False, url=f"#{p.anchor}", **how)
