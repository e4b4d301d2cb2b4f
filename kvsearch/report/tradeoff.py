"""Text against what is asked: what policies lose of a text, and of the contexts of questions."""

from dataclasses import dataclass
from math import expm1
from typing import Any

import numpy as np

from kvsearch.report.figure import (
    COLOUR,
    FAINT,
    INK,
    KINDS,
    LABEL,
    MARK,
    bare,
    new_figure,
    png,
    style,
)
from kvsearch.report.labels import place
from kvsearch.results.records import Kind, Row
from kvsearch.results.summary import Summary


@dataclass(frozen=True)
class Point:
    """A policy within the budget.

    Attributes:
        name, kind: of its row.
        text: perplexity above the full cache's, in per cent.
        asked: share of the contexts of questions that is lost, in per cent.
        corner: what it is the best at, if it is one of the three.
    """

    name: str
    kind: Kind
    text: float
    asked: float
    corner: str = ""


def tradeoff(summary: Summary) -> tuple[Point, ...]:
    """The policies within the budget; none unless a text and questions were measured together."""
    rows = [r for r in summary.rows if r.text is not None and r.asked and r.within_budget]
    if len(rows) < 2:
        return ()
    where = {r.name: _place(r) for r in rows}
    corners = {
        min(where, key=lambda n: where[n][1]): "keeps most of what is asked",
        min(where, key=lambda n: where[n][0]): "best on the text",
    }
    if summary.recommended in where:
        corners[summary.recommended] = "recommended"
    return tuple(Point(r.name, r.kind, *where[r.name], corners.get(r.name, "")) for r in rows)


def _place(row: Row) -> tuple[float, float]:
    assert row.text is not None and row.text.dnll is not None
    lost = float(np.mean([k.lost.mean for k in row.asked]))
    return 100 * expm1(min(row.text.dnll.mean, 20.0)), 100 * lost


def draw_tradeoff(points: tuple[Point, ...], *, narrow: bool = False) -> bytes:
    """PNG bytes of the picture: left is better on the text, below is better on what is asked.

    Args:
        points: from `tradeoff`.
        narrow: for a screen of about 400 px.
    """
    width, height = (4.3, 4.0) if narrow else (8.4, 4.2)
    with style(8 if narrow else 9.5):
        figure = new_figure(width, height)
        axes = figure.add_axes((0.62 / width, 0.55 / height, 1 - 0.8 / width, 1 - 0.95 / height))
        bare(axes)
        for kind in KINDS:
            some = [p for p in points if p.kind == kind]
            if some:
                axes.scatter(
                    [p.text for p in some], [p.asked for p in some], marker=MARK[kind], s=34,
                    color=COLOUR[kind], label=LABEL[kind], zorder=3, linewidths=0,
                )  # fmt: skip
        for p in points:
            if p.corner == "recommended":
                axes.scatter(
                    [p.text], [p.asked], s=150, facecolors="none", edgecolors=INK, zorder=2
                )
        axes.axhline(0, color=FAINT, lw=0.8, zorder=1)
        axes.axvline(0, color=FAINT, lw=0.8, zorder=1)
        axes.margins(0.12, 0.12)
        axes.set_xlabel("perplexity above the full cache's, %")
        axes.set_ylabel("context lost of what is asked, %")
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if narrow else 4, frameon=False,
            fontsize="small", handletextpad=0.2, columnspacing=1.0, borderaxespad=0,
        )  # fmt: skip
        _named(figure, axes, points)
        return png(figure)


def _named(figure: Any, axes: Any, points: tuple[Point, ...]) -> None:
    """Names beside their marks, corners first; a name without room is left out."""
    figure.canvas.draw()  # settles the limits of the axes
    renderer, pixel = figure.canvas.get_renderer(), figure.dpi / 72
    order = sorted(points, key=lambda p: (p.corner != "recommended", not p.corner, p.asked))
    texts = [
        axes.text(
            0, 0, f"{p.name}: {p.corner}" if p.corner else p.name, fontsize="small",
            color=COLOUR[p.kind], fontweight="bold" if p.corner == "recommended" else "normal",
        )
        for p in order
    ]  # fmt: skip
    extents = [t.get_window_extent(renderer) for t in texts]
    anchors = [tuple(axes.transData.transform((p.text, p.asked))) for p in order]
    marks = [(x - 5 * pixel, y - 5 * pixel, x + 5 * pixel, y + 5 * pixel) for x, y in anchors]
    frame = axes.get_window_extent(renderer)
    bounds = (frame.x0, frame.y0, frame.x1, frame.y1)
    sizes = [(e.width + 2 * pixel, e.height) for e in extents]
    places = place(anchors, sizes, marks, bounds, 7 * pixel)
    for text, box in zip(texts, places, strict=True):
        if box is None:
            text.remove()
            continue
        at = axes.transData.inverted().transform((box[0], box[1]))
        text.set(position=tuple(at), va="bottom")
