"""What all pictures share: colours that survive colour blindness, marks, and bytes of a file."""

import io
from typing import Any

from kvsearch.results.records import Kind

DPI = 200  # twice the pixels of a plain screen at a hundred to the inch
INK, GREY, FAINT = "#1c2530", "#5c6773", "#d9dee3"

# Paul Tol's high-contrast triple: apart for every colour vision, and in grey print too; and a teal.
COLOUR: dict[Kind, str] = {
    "full": "#000000",
    "method": "#004488",
    "combined": "#c48a00",
    "earlier": "#0f8a80",
    "searched": "#bb3355",
}
LABEL: dict[Kind, str] = {
    "full": "full cache",
    "method": "published method",
    "combined": "combined by hand",
    "earlier": "found by earlier searches",
    "searched": "found by the search",
}
# one shape a kind, so that colour is never the only sign
MARK: dict[Kind, str] = {
    "full": "*",
    "method": "o",
    "combined": "s",
    "earlier": "^",
    "searched": "D",
}
KINDS: tuple[Kind, ...] = ("searched", "earlier", "combined", "method", "full")


def style(size: float, **more: Any) -> Any:
    """How a picture is drawn in this context, with letters of so many points."""
    from matplotlib import rc_context

    return rc_context({"font.size": size, "axes.labelcolor": INK, "text.color": INK, **more})


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of so many inches without global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def png(figure: Any) -> bytes:
    """The figure as PNG bytes; equal figures give equal bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def svg(figure: Any, name: str) -> str:
    """The figure as an `<svg>` element for a page; equal figures give equal text.

    Args:
        figure: what to write; marks with a `url` become links.
        name: tells the ids of this element from those of others on the page.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :].replace(' target="_blank"', "")


def bare(axes: Any) -> None:
    """Take the box away and keep two quiet axes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.tick_params(colors=GREY, labelcolor=INK, length=3, width=0.7)


def note(axes: Any, said: str, at: Any, offset: tuple[float, float], **how: Any) -> Any:
    """Small text beside a point of the data, so many points of type away."""
    style = {"va": "center", "fontsize": "small", "color": GREY}
    return axes.annotate(said, at, xytext=offset, textcoords="offset points", **style | how)


def cut(text: Any, pixels: float) -> None:
    """Shorten a drawn text to a width, with dots at its end."""
    renderer, said = text.figure.canvas.get_renderer(), text.get_text()
    for most in range(len(said), 0, -1):
        text.set_text(said if most == len(said) else f"{said[:most].rstrip()}…")
        if text.get_window_extent(renderer).width <= pixels:
            return
