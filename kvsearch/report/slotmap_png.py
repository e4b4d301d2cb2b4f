"""The slot map as a picture: layers down, tokens or slots across, colour is precision."""

from typing import Any

import numpy as np

from kvsearch.report.figure import GREY, bare, new_figure, note, png, style
from kvsearch.report.slotmap import CHOSEN, FIRST_TIER, GONE, NATIVE, AgeMap, SlotBars

EMPTY = "#eceff2"
_TIERS = ["#e08214", "#35978f", "#c06fa8", "#8a8f98"]  # apart for every colour vision
SINK_COLUMNS = 12


def colour(code: int) -> str:
    """Colour of a code: navy is 16 bits, grey is gone."""
    if code == GONE:
        return EMPTY
    return "#1f3b73" if code == NATIVE else _TIERS[(code - FIRST_TIER) % len(_TIERS)]


def draw_slots(found: AgeMap | SlotBars, *, narrow: bool = False) -> bytes:
    """PNG bytes of a slot map.

    Args:
        found: what to draw.
        narrow: for a screen of about 400 px.
    """
    layers = len(found.codes) if isinstance(found, AgeMap) else len(found.layers)
    with style(8 if narrow else 9.5, **{"hatch.linewidth": 0.6}):
        width = 4.3 if narrow else 10.4
        height = min(8.0, 1.5 + (0.1 if narrow else 0.13) * max(8, layers))
        figure = new_figure(width, height)
        if isinstance(found, AgeMap):
            _draw_ages(found, figure, narrow)
        else:
            _draw_bars(found, figure, narrow)
        return png(figure)


def _margins(figure: Any, narrow: bool) -> dict[str, float]:
    height = figure.get_figheight()
    return {
        "left": 0.13 if narrow else 0.065,
        "right": 0.975,
        "bottom": 0.55 / height,
        "top": 1 - 0.42 / height,
    }


def _layer_axis(axes: Any, rows: int, heads: int) -> None:
    layers = rows // heads
    step = next(s for s in (1, 2, 5, 10, 20, 50) if layers / s <= 12)
    ticks = range(0, layers, step)
    axes.set_yticks([heads * i + (heads - 1) / 2 for i in ticks], [str(i) for i in ticks])
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_ylabel("layer (0 reads the input)")


def _key(figure: Any, legend: dict[int, str], extra: list[Any]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour(code), label=name) for code, name in legend.items()]
    figure.legend(
        handles=patches + extra,
        loc="upper left",
        ncols=6,
        frameon=False,
        fontsize="small",
        handlelength=1.4,
        columnspacing=1.4,
    )


def _draw_ages(found: AgeMap, figure: Any, narrow: bool) -> None:
    """Every token on one line per layer; the first ones again on the left, enlarged."""
    from matplotlib.patches import Patch

    layers, tokens = found.codes.shape
    margins, first = _margins(figure, narrow), min(tokens, SINK_COLUMNS)
    zoom = found.sinks > 0 and tokens > 8 * SINK_COLUMNS
    grid = figure.add_gridspec(
        1,
        2 if zoom else 1,
        width_ratios=(1, 9) if zoom else None,
        wspace=0.08 if narrow else 0.03,
        **margins,
    )
    main = figure.add_subplot(grid[0, -1])
    rows: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    down = layers - 0.5, -0.5
    image = _mixed(found.codes, 330 if narrow else 900)
    main.imshow(image, extent=(tokens, 0, *down), **rows)
    main.set_xlabel("tokens ago (the newest is at the right)")
    bare(main)
    left = main
    if zoom:
        left = figure.add_subplot(grid[0, 0])
        left.imshow(_mixed(found.codes[:, :first], first), extent=(0, first, *down), **rows)
        left.set_xticks([first / 2], [f"first {first}"])
        main.set_yticks([])
        main.set_ylim(*down)
        bare(left)
        left.tick_params(axis="x", length=0)
    _layer_axis(left, layers, found.heads)
    _key(figure, found.legend, [Patch(color=EMPTY, label="gone")])


def _mixed(codes: np.ndarray, columns: int) -> np.ndarray:
    """RGB image of at most `columns` columns; a column of several tokens mixes their colours."""
    from matplotlib.colors import to_rgb

    palette = np.array([to_rgb(colour(code)) for code in range(int(codes.max()) + 1)])
    tokens = codes.shape[1]
    edges = np.linspace(0, tokens, min(columns, tokens) + 1).round().astype(int)
    rgb = palette[codes]
    sums = np.add.reduceat(rgb, edges[:-1], axis=1)
    image: np.ndarray = sums / np.diff(edges)[None, :, None]
    return image


def _draw_bars(found: SlotBars, figure: Any, narrow: bool) -> None:
    """Stacked slots per layer, aligned at the newest token."""
    from matplotlib.patches import Patch

    axes = figure.add_subplot(figure.add_gridspec(1, 1, **_margins(figure, narrow))[0])
    most = max(sum(s.count for s in bar) for bar in found.layers)
    for y, bar in enumerate(found.layers):
        right = 0
        for segment in reversed(bar):
            chosen = segment.role == CHOSEN
            axes.barh(
                y,
                segment.count,
                left=right,
                height=0.82,
                color=colour(segment.code),
                edgecolor="white",
                lw=0.35,
                hatch="////" if chosen else None,
            )
            right += segment.count
        if y % (1 + len(found.layers) // 48) == 0:
            note(axes, f"{right:,}", (right, y), (-3, 0), ha="right", fontsize=5.5)
    axes.set_xlim(most * (1.09 if narrow else 1.05), 0)
    axes.set_xlabel(
        "slots (the newest token at the right)"
        if found.tokens is None
        else "tokens (the newest at the right)"
    )
    _layer_axis(axes, len(found.layers), found.heads)
    bare(axes)
    _roles(axes, found)
    hatched = Patch(
        facecolor="white",
        edgecolor=GREY,
        hatch="////",
        lw=0.5,
        label="striped: chosen by the rule",
    )
    _key(figure, found.legend, [hatched])


def _roles(axes: Any, found: SlotBars) -> None:
    """Names above the first layer's segments, where there is room for them."""
    right = 0
    for segment in reversed(found.layers[0]):
        middle, right = right + segment.count / 2, right + segment.count
        name = {CHOSEN: "chosen by the rule", "newest": ""}.get(
            segment.role, f"{segment.count} {segment.role}"
        )
        if name and segment.count > 0.08 * axes.get_xlim()[0]:
            how = {"ha": "center", "va": "bottom", "fontsize": "x-small"}
            note(axes, name, (middle, -0.5), (0, 2), **how)
