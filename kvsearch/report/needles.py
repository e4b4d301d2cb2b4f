"""The map of needles: which facts are found, by their depth in the context and by its length."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.report.figure import COLOUR, FAINT, GREY, INK, new_figure, png, style
from kvsearch.report.screen import shortened
from kvsearch.results.records import Kind, Needle, Row
from kvsearch.results.summary import Summary

BINS = 5  # of the depth
SCALE = ("#f4e3d7", "#2a6f8f")  # none and all of the answers exact; apart in grey print, too


@dataclass(frozen=True, eq=False)
class Panel:
    """One policy's map.

    Attributes:
        name: of the policy.
        kind: of its row.
        exact, asked: answers, by length (rows) and depth `[lengths, BINS]`.
    """

    name: str
    kind: Kind
    exact: NDArray[np.int64]
    asked: NDArray[np.int64]


@dataclass(frozen=True)
class NeedleMap:
    """The full cache, the recommended policy and the best published method.

    Attributes:
        rows: task and length of its longest context, shortest first.
        panels: one a policy.
    """

    rows: tuple[tuple[str, int], ...]
    panels: tuple[Panel, ...]


def needle_map(summary: Summary) -> NeedleMap | None:
    """The map of a run; None if it has no task that asks for one fact."""
    rows = {r.name: r for r in summary.rows if r.needles}
    best = summary.against("method")
    names = ["full", summary.recommended, None if best is None else best.against]
    shown = [rows[n] for n in dict.fromkeys(names) if n in rows]
    if not shown:
        return None
    lengths: dict[str, int] = {}
    for needle in (n for row in shown for n in row.needles):
        lengths[needle.workload] = max(needle.length, lengths.get(needle.workload, 0))
    ordered = tuple(sorted(lengths.items(), key=lambda item: item[1]))
    tasks = [name for name, _ in ordered]
    return NeedleMap(ordered, tuple(_panel(row, tasks) for row in shown))


def _panel(row: Row, tasks: list[str]) -> Panel:
    exact, asked = (np.zeros((len(tasks), BINS), dtype=np.int64) for _ in range(2))
    for needle in row.needles:
        at = tasks.index(needle.workload), _bin(needle)
        asked[at] += 1
        exact[at] += needle.exact
    return Panel(row.name, row.kind, exact, asked)


def _bin(needle: Needle) -> int:
    return min(BINS - 1, int(needle.depth * BINS))


def draw_needles(found: NeedleMap, *, narrow: bool = False) -> bytes:
    """PNG bytes of a map.

    Args:
        found: what to draw.
        narrow: for a screen of about 400 px: policies below each other.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shades, many = LinearSegmentedColormap.from_list("exact", SCALE), len(found.panels)
    tall, size = 0.42 * len(found.rows), 4.3 if narrow else 10.4
    longest = max(len(name) for name, _ in found.rows)
    left = min(0.28 + (0.062 if narrow else 0.074) * max(longest, 12), 0.48 * size) / size
    with style(8 if narrow else 9.5):
        if narrow:
            each = tall + 0.42
            height = many * each + 0.8
            tops = [height - i * each - 0.3 for i in range(many)]
            boxes = [(left, (top - tall) / height, 0.96 - left, tall / height) for top in tops]
        else:
            height, gap = tall + 1.3, 0.035
            width = (0.98 - left - (many - 1) * gap) / many
            boxes = [(left + i * (width + gap), 0.9 / height, width, tall / height)
                     for i in range(many)]  # fmt: skip
        figure = new_figure(size, height)
        for i, (panel, box) in enumerate(zip(found.panels, boxes, strict=True)):
            axes = figure.add_axes(box)
            _draw(panel, axes, shades)
            _label(found, axes, rows=narrow or i == 0, columns=not narrow or i == many - 1)
        _key(figure, shades, left, height)
        return png(figure)


def _draw(panel: Panel, axes: Any, shades: Any) -> None:
    from matplotlib.patches import Rectangle

    for (y, x), asked in np.ndenumerate(panel.asked):
        share = panel.exact[y, x] / asked if asked else 0.0
        colour = shades(share) if asked else "white"
        edge, depth = ("white", 1) if asked else (FAINT, 2)
        axes.add_patch(
            Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=edge, lw=1.2, zorder=depth)
        )
        axes.text(
            x + 0.5, y + 0.5, f"{panel.exact[y, x]}/{asked}" if asked else "", ha="center",
            va="center", fontsize="small", color="white" if share > 0.55 else INK, zorder=3,
        )  # fmt: skip
    axes.set_xlim(0, panel.asked.shape[1])
    axes.set_ylim(panel.asked.shape[0], 0)
    total = f"{panel.exact.sum()} of {panel.asked.sum()}"
    axes.set_title(f"{panel.name}: {total}", loc="left", fontsize="medium",
                   color=COLOUR[panel.kind])  # fmt: skip
    axes.spines[:].set_visible(False)


def _label(found: NeedleMap, axes: Any, *, rows: bool, columns: bool) -> None:
    axes.tick_params(length=0, labelcolor=INK, pad=3)
    names = [f"{shortened(name, 30)}\n{length:,} tokens" for name, length in found.rows]
    axes.set_yticks([i + 0.5 for i in range(len(names))], names if rows else [""] * len(names),
                    fontsize="small")  # fmt: skip
    edges = [f"{100 * i // BINS}" for i in range(BINS + 1)] if columns else [""] * (BINS + 1)
    axes.set_xticks(range(BINS + 1), edges, fontsize="small")
    if columns:
        axes.set_xlabel("depth of the fact, % of the context", color=INK, labelpad=2)


def _key(figure: Any, shades: Any, left: float, height: float) -> None:
    """What the shades mean, at the bottom."""
    axes = figure.add_axes((left, 0.12 / height, 0.2, 0.1 / height))
    axes.imshow(np.linspace(0, 1, 64)[None], aspect="auto", cmap=shades, extent=(0, 1, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    for x, align, word in ((-0.03, "right", "none exact"), (1.03, "left", "all exact")):
        axes.text(x, 0.4, word, transform=axes.transAxes, ha=align, va="center", fontsize="small",
                  color=GREY)  # fmt: skip
