"""The Pareto picture drawn by plotly: one self-contained page with details on hover."""

import json
import math
import textwrap
from html import escape
from itertools import pairwise
from typing import Any

from kvsearch.records import Kind
from kvsearch.report.comparison_html import comparison
from kvsearch.report.figure import COLOUR, FAINT, GREY, INK, KINDS, LABEL, SYMBOL
from kvsearch.report.labels import BESIDE, Box, direction, place
from kvsearch.report.pareto_plot import Picture, Point, ppl_ticks
from kvsearch.report.tables import bytes_text

NARROW = 640  # pixels of a window, below which there are no names
WIDE, HIGH = 480, 330  # of the upper panel in such a window
LETTER, LINE = 7, 16  # of a letter of a name, about, and of its height
SIDES = {
    (1, 1): "top right", (1, 0): "middle right", (1, -1): "bottom right", (0, 1): "top center",
    (0, -1): "bottom center", (-1, 1): "top left", (-1, 0): "middle left", (-1, -1): "bottom left",
}  # fmt: skip

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>kvsearch: loss against memory, {model}</title>
<style>
body {{ margin: 0; background: #fff; color: {ink}; font: 15px/1.45 system-ui, sans-serif; }}
header {{ max-width: 72rem; margin: 0 auto; padding: 1rem 1rem 0; }}
h1 {{ font-size: 1.2rem; margin: 0 0 .3rem; }}
p {{ margin: 0 0 .4rem; max-width: 46rem; }}
html {{ overflow-y: scroll; }}
main {{ max-width: 96rem; margin: 0 auto; display: grid; gap: 1rem;
  grid-template-columns: minmax(0, 2fr) minmax(0, 1fr); }}
.front {{ height: 84vh; min-height: 38rem; }}
@media (max-width: 1000px) {{ main {{ grid-template-columns: minmax(0, 1fr); }} }}
</style></head><body>
<header><h1>KV-cache policies for {model}: loss against memory</h1>
<p>Each mark is one policy, measured on the report {material} {report} (n = {tokens} {count}).
{placed}The line is the front: no other policy has both fewer bytes and a lower mean loss. Bars are
95 % intervals of the paired difference to the full cache. Filled marks are on the front, and the
recommended policy has a dark rim. Beside it, policies of about the budget's bytes are compared.
Point at a mark, or tap it, to read its policy; drag to zoom, double-click to go
back.{beyond}</p></header>
<main><div class="front">{plot}</div><div>{beside}</div></main></body></html>
"""


def draw_html(info: Picture) -> str:
    """A whole HTML page with plotly's script inside; nothing is fetched when it opens.

    Args:
        info: what to draw.
    """
    figure = _figure(info)
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=True,
        default_height="100%",
        div_id="pareto",
        config={"displayModeBar": False, "responsive": True},
        post_script=_narrow(info),
    )
    beside = comparison(info, hover).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id="comparison",
        config={"displayModeBar": False, "responsive": True},
    )
    beyond = ""
    if info.beyond:
        beyond = " Drawn as triangles at the upper edge, because their loss is above it: "
        beyond += ", ".join(escape(p.name) for p in info.beyond) + "."
    return _PAGE.format(
        model=escape(info.model),
        report=escape(info.report_text),
        material=info.words.material,
        count=info.words.count,
        plot=plot,
        beside=beside,
        tokens=info.tokens,
        placed=f"{info.placed} " if info.placed else "",
        beyond=beyond,
        ink=INK,
    )


def _narrow(info: Picture) -> str:
    """Script for narrow screens: fewer ticks, shorter words, and names only on a tap."""
    ticks = info.x_ticks[::-1][:: 2 if len(info.x_ticks) > 3 else 1][::-1]
    change: dict[str, Any] = {
        "yaxis.title.text": f"{info.words.loss} ({info.words.unit})",
        "annotations[0].text": "budget",
        "margin.l": 52,
        "margin.r": 44,
        "annotations[1].text": f"trials on the search {info.words.material}, no intervals",
    }
    for axis in ("xaxis", "xaxis2"):
        change[f"{axis}.tickvals"] = [x for x, _ in ticks]
        change[f"{axis}.ticktext"] = [label.replace("\n", "<br>") for _, label in ticks]
    return f"""if (window.innerWidth < {NARROW}) {{
  const plot = document.getElementById("pareto");
  Plotly.relayout(plot, {json.dumps(change)});
  Plotly.restyle(plot, {{mode: "markers"}}, plot.data.flatMap((t, i) => t.text ? [i] : []));
}}"""


def _figure(info: Picture) -> Any:
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        row_heights=[0.75, 0.25],
        vertical_spacing=0.07,
        specs=[[{"secondary_y": True}], [{}]],
    )
    _stairs(info, figure)
    for kind, curve in info.curves:
        figure.add_scatter(
            x=[x for x, _ in curve.points],
            y=[min(y, info.y_range[1]) for _, y in curve.points],
            mode="lines+markers",
            row=1,
            col=1,
            line={"width": 1.5, "color": COLOUR[kind]},
            marker={"size": 5},
            hovertext=[f"{curve.name} at {bytes_text(x)}" for x, _ in curve.points],
            hoverinfo="text",
            showlegend=False,
        )
    names = _names(info)
    for kind in KINDS:
        _rows(info, figure, kind, names)
    _trials(info, figure)
    _frame(info, figure)
    return figure


def _stairs(info: Picture, figure: Any) -> None:
    if not info.stairs:
        return
    line = [
        (info.stairs[0][0], max(info.y_range[1], info.stairs[0][1])),
        *info.stairs,
        (info.x_range[1], info.stairs[-1][1]),
    ]
    figure.add_scatter(
        x=[x for x, _ in line],
        y=[y for _, y in line],
        mode="lines",
        name="front",
        line={"color": INK, "width": 1.5},
        opacity=0.55,
        hoverinfo="skip",
        row=1,
        col=1,
    )


def _rows(info: Picture, figure: Any, kind: Kind, names: dict[str, str]) -> None:
    """Rows of one kind; filled on the front, hollow off it, a triangle beyond the panel.

    `names` has the sides of those that are named.
    """
    mine = [p for p in info.points if p.kind == kind]
    if not mine:
        return
    edge = info.y_range[1]
    rim = edge - 0.015 * (edge - info.y_range[0])  # whole triangles, not halves
    shown = [rim if p.y > edge else p.y for p in mine]
    compared = info.at_budget()  # their bars are in the other picture
    bars = [p for p in mine if p.y <= edge and (p.on_front or p not in compared)]
    figure.add_scatter(
        x=[p.x for p in mine],
        y=shown,
        name=LABEL[kind],
        mode="markers+text",
        row=1,
        col=1,
        text=[_name(p) if p.name in names else "" for p in mine],
        textposition=[names.get(p.name, "top right") for p in mine],
        textfont={"size": 11, "color": COLOUR[kind]},
        error_y={
            "type": "data",
            "symmetric": False,
            "thickness": 1.2,
            "width": 3,
            "array": [p.hi - p.y if p in bars else 0 for p in mine],
            "arrayminus": [p.y - p.lo if p in bars else 0 for p in mine],
        },
        marker={
            "symbol": [_symbol(p, edge) for p in mine],
            "opacity": 1,
            "color": COLOUR[kind],
            "size": [_size(p) for p in mine],
            "line": {"width": 2, "color": [INK if p.recommended else COLOUR[kind] for p in mine]},
        },
        hovertext=[hover(p) for p in mine],
        hoverinfo="text",
    )


def _names(info: Picture) -> dict[str, str]:
    """Which points are named, and at what side of them: the front, where a name has room.

    Policies at the budget are named in the comparison beside the picture, all but the recommended
    one not here. Room is that of the smallest panel in which there are names (`_narrow`).
    """
    beside = {p.name for p in info.at_budget()}
    named = [p for p in info.points if p.recommended or (p.on_front and p.name not in beside)]
    named.sort(key=lambda p: (not p.recommended, p.y))
    (x0, x1), (y0, y1) = (math.log(x) for x in info.x_range), info.y_range

    def pixels(x: float, y: float) -> tuple[float, float]:
        return (math.log(x) - x0) / (x1 - x0) * WIDE, (min(y, y1) - y0) / (y1 - y0) * HIGH

    taken: list[Box] = []
    for p in info.points:
        x, y = pixels(p.x, p.y)
        half = _size(p) / 2
        taken.append((x - half, y - half, x + half, y + half))
    zero = ((info.x_range[0], 0.0), (info.x_range[1], 0.0))
    for one, other in [zero, *pairwise(info.stairs)]:
        (a, b), (c, d) = pixels(*one), pixels(*other)
        taken.append((min(a, c), min(b, d), max(a, c), max(b, d)))
    x, y = pixels(info.budget_bytes, 0)
    taken.append((x - LETTER * len(info.budget_label), y - LINE, x, y))
    anchors = [pixels(p.x, p.y) for p in named]
    sizes = [(LETTER * len(p.name), LINE) for p in named]
    boxes = place(anchors, sizes, taken, (0, 0, WIDE, HIGH), 12, reach=BESIDE)
    return {
        p.name: SIDES[direction(box, at)]
        for p, at, box in zip(named, anchors, boxes, strict=True)
        if box is not None
    }


def _name(p: Point) -> str:
    return f"<b>{escape(p.name)}</b>" if p.recommended else escape(p.name)


def _size(p: Point) -> int:
    """Pixels of a mark."""
    return 15 if p.recommended or p.kind == "full" else 11


def _symbol(p: Point, edge: float) -> str:
    shape = "triangle-up" if p.y > edge else SYMBOL[p.kind]
    return shape if p.on_front else f"{shape}-open"


def hover(p: Point) -> str:
    """What stands beside a mark that is pointed at."""
    lines: list[str] = []
    for line in p.hover[1:]:
        lines += textwrap.wrap(line, 46)
    body = "<br>".join(escape(line, quote=False) for line in lines)
    return f"<b>{escape(p.hover[0], quote=False)}</b><br>{body}"


def _trials(info: Picture, figure: Any) -> None:
    edge = info.trial_range[1]
    for kind in KINDS:
        mine = [t for t in info.trials if t.kind == kind]
        if mine:
            figure.add_scatter(
                x=[t.x for t in mine],
                y=[min(t.y, edge) for t in mine],
                mode="markers",
                marker={"symbol": SYMBOL[kind], "color": COLOUR[kind], "size": 8},
                opacity=0.4,
                name=f"trials: {LABEL[kind]}",
                showlegend=False,
                hovertext=[hover(t) for t in mine],
                hoverinfo="text",
                row=2,
                col=1,
            )


def _frame(info: Picture, figure: Any) -> None:
    """Axes, the budget, the full cache and what the two panels are."""
    for row in (1, 2):
        figure.add_hline(y=0, line={"color": "black", "width": 1, "dash": "dash"}, row=row, col=1)
        figure.add_vline(x=info.budget_bytes, line={"color": GREY, "width": 1.2}, row=row, col=1)
        figure.add_vrect(
            x0=info.budget_bytes,
            x1=2 * info.x_range[1],
            fillcolor=FAINT,
            opacity=0.35,
            line_width=0,
            layer="below",
            row=row,
            col=1,
        )
    log_range = [math.log10(v) for v in info.x_range]
    figure.update_xaxes(
        type="log",
        range=log_range,
        tickvals=[x for x, _ in info.x_ticks],
        ticktext=[label.replace("\n", "<br>") for _, label in info.x_ticks],
        showgrid=False,
        linecolor=GREY,
        ticks="outside",
    )
    figure.update_xaxes(title="KV cache per sequence, peak", row=2, col=1)
    grid = {"gridcolor": FAINT, "zeroline": False, "linecolor": GREY}
    figure.update_yaxes(
        range=list(info.y_range),
        title=info.words.above,
        row=1,
        col=1,
        secondary_y=False,
        **grid,
    )
    figure.update_yaxes(range=list(info.trial_range), title=info.words.loss, row=2, col=1, **grid)
    marks = ppl_ticks(info, 9)
    if marks:  # a right axis exists only once something is drawn against it
        figure.add_scatter(
            x=[info.x_range[0]],
            y=[0],
            mode="markers",
            marker={"opacity": 0},
            hoverinfo="skip",
            showlegend=False,
            row=1,
            col=1,
            secondary_y=True,
        )
        figure.update_yaxes(
            matches="y",
            tickvals=[y for y, _ in marks],
            ticktext=[label for _, label in marks],
            title="PPL",
            showgrid=False,
            row=1,
            col=1,
            secondary_y=True,
        )
    small = {"showarrow": False, "font": {"size": 12, "color": GREY}}
    figure.add_annotation(
        text=info.budget_label,
        x=math.log10(info.budget_bytes),
        y=0,
        xanchor="right",
        yanchor="top",
        xref="x",
        yref="y",
        **small,
    )
    note = (
        f"{len(info.trials)} completed trials on {escape(info.search_text)}: "
        f"other {info.words.material}, no intervals"
    )
    figure.add_annotation(
        text=note,
        xref="paper",
        x=0,
        yref="y3 domain",
        y=1,
        xanchor="left",
        yanchor="bottom",
        **small,
    )
    figure.update_layout(
        template="plotly_white",
        font={"color": INK, "family": "system-ui, sans-serif"},
        margin={"l": 64, "r": 56, "t": 48, "b": 56},
        hovermode="closest",
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"size": 12, "color": INK}},
    )
