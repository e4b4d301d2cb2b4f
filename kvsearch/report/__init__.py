"""What a person opens after a run: the table, the pictures, the policies and one page of words."""

from pathlib import Path
from typing import Any

from kvsearch.files import finite, write_atomic
from kvsearch.report import facts
from kvsearch.report.tables import front_csv, policy_files
from kvsearch.results.records import Row
from kvsearch.results.summary import Summary

__all__ = ["write_report"]


def write_report(summary: Summary, folder: Path) -> list[Path]:
    """Write `policies/*.json`, `front.csv`, `pareto.png`, `pareto.html` and `report.html`.

    Everything is made before anything is written, and each file is replaced whole, so a folder
    never holds half a report. The same summary gives the same files.

    Args:
        summary: what a run leaves behind.
        folder: where to write; made if absent.

    Returns:
        Paths written, the page to open last.

    Raises:
        RunError: the folder cannot be written.
    """
    from kvsearch.report.figure import png, svg
    from kvsearch.report.html import draw_images, pareto_page, render
    from kvsearch.report.pareto_figure import draw
    from kvsearch.report.pareto_plot import picture

    shape = summary.study.shape
    info = picture(summary, shape)
    drawn = draw(info)
    images = draw_images(summary, shape, info, drawn)
    names = policy_files(summary.rows)
    files: dict[str, str | bytes] = {
        f"policies/{names[row.name]}": _policy_json(summary, row) for row in summary.rows
    }
    files["front.csv"] = front_csv(summary.rows)
    files["pareto.png"] = png(drawn)
    files["pareto.html"] = pareto_page(info, svg(drawn, "pareto"))
    files["report.html"] = render(summary, shape, images, info)
    return [write_atomic(folder / name, content) for name, content in files.items()]


def _policy_json(summary: Summary, row: Row) -> str:
    """The policy with its name and its measures, which are not part of its identity."""
    d = row.dnll_full
    measured: dict[str, Any] = {
        "model": summary.model.name,
        "text": facts.text_name(summary),
        "tokens": row.tokens,
        "nll": row.nll,
        "ppl": row.ppl,
        "dnll_full": [d.mean, d.lo, d.hi],
        "bytes_peak": row.bytes_peak,
    }
    about = {**row.policy.about, "fingerprint": row.fingerprint, "measured": finite(measured)}
    return row.policy.model_copy(update={"name": row.name, "about": about}).to_json()
