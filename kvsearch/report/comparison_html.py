"""The comparison at the budget, drawn by plotly: a row per policy, least loss first."""

from html import escape
from typing import Any

from kvsearch.records import Kind
from kvsearch.report.figure import COLOUR, FAINT, INK, KINDS, SYMBOL
from kvsearch.report.pareto_plot import Picture, Point
from kvsearch.report.tables import signed

ROW, MARGIN = 24, 110  # pixels of one row, and of what is above and below all rows


def comparison(info: Picture, hover: Any) -> Any:
    """A plotly figure.

    Args:
        info: what to draw.
        hover: gives the text beside a mark that is pointed at.
    """
    from plotly.graph_objects import Figure

    rows = info.at_budget()
    figure = Figure()
    for kind in KINDS:
        _rows(figure, info, [(i, p) for i, p in enumerate(rows) if p.kind == kind], kind, hover)
    for i, p in enumerate(rows):
        if p.recommended:
            figure.add_hrect(
                y0=i - 0.45, y1=i + 0.45, fillcolor=FAINT, opacity=0.7, line_width=0, layer="below"
            )
    figure.add_vline(x=0, line={"color": "black", "width": 1, "dash": "dash"})
    figure.update_xaxes(
        range=list(info.y_range),
        title="<br>".join(filter(None, (info.loss, info.note))),
        gridcolor=FAINT,
        zeroline=False,
    )
    figure.update_yaxes(
        range=[len(rows) - 0.4, -0.6],
        tickvals=list(range(len(rows))),
        ticktext=[_name(p) for p in rows],
        showgrid=False,
        zeroline=False,
        automargin=True,
    )
    figure.update_layout(
        template="plotly_white",
        title={"text": "At the budget, least loss first", "font": {"size": 14}},
        font={"color": INK, "family": "system-ui, sans-serif"},
        margin={"l": 8, "r": 60, "t": 48, "b": 56},
        height=MARGIN + ROW * max(len(rows), 1),
        hovermode="closest",
        showlegend=False,
        hoverlabel={"align": "left", "bgcolor": "white", "font": {"size": 12, "color": INK}},
    )
    return figure


def _rows(
    figure: Any, info: Picture, mine: list[tuple[int, Point]], kind: Kind, hover: Any
) -> None:
    """Rows of one kind with their losses on the right; a triangle beyond the panel."""
    edge = info.y_range[1]
    if not mine:
        return
    figure.add_scatter(
        x=[min(p.y, edge) for _, p in mine],
        y=[i for i, _ in mine],
        mode="markers",
        cliponaxis=False,
        error_x={
            "type": "data",
            "symmetric": False,
            "thickness": 1.6,
            "width": 0,
            "array": [max(0.0, min(p.hi, edge) - min(p.y, edge)) for _, p in mine],
            "arrayminus": [max(0.0, min(p.y, edge) - p.lo) for _, p in mine],
        },
        marker={
            "symbol": [_symbol(p, edge) for _, p in mine],
            "color": COLOUR[kind],
            "size": 10,
            "opacity": 1,
            "line": {"width": 2, "color": COLOUR[kind]},
        },
        hovertext=[hover(p) for _, p in mine],
        hoverinfo="text",
    )
    for i, p in mine:
        figure.add_annotation(
            text=signed(p.y, 3 if abs(p.y) < 1 else 2),
            xref="paper",
            x=1.02,
            y=i,
            xanchor="left",
            showarrow=False,
            font={"size": 12},
        )


def _symbol(p: Point, edge: float) -> str:
    shape = "triangle-right" if p.y > edge else SYMBOL[p.kind]
    return shape if p.on_front else f"{shape}-open"


def _name(p: Point) -> str:
    text = f'<span style="color:{COLOUR[p.kind]}">{escape(p.name)}</span>'
    return f"<b>{text}</b>" if p.recommended else text
