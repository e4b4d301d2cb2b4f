"""The report as one page: words and cells are computed here, the template only lays them out."""

import base64
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from kvsearch.policy import ModelShape, Policy
from kvsearch.report import facts
from kvsearch.report.describe import compact_json, describe
from kvsearch.report.facts import STATES
from kvsearch.report.figure import LABEL, svg
from kvsearch.report.pareto_plot import Picture
from kvsearch.report.recommendation import recommendation
from kvsearch.report.slotmap import caption, slot_map
from kvsearch.report.tables import (
    at_least,
    behind_text,
    bytes_text,
    interval_text,
    kept_text,
    policy_files,
    signed,
    verdict,
)
from kvsearch.report.words import Words, words_of
from kvsearch.results.records import Example, Row
from kvsearch.results.summary import Summary

_SHORT = {
    "better": "better than",
    "worse": "worse than",
    "no clear difference": "no clear difference to",
}
# the marks of the picture, filled on the front and hollow off it
_GLYPH = {"full": "★☆", "method": "●○", "combined": "■□", "earlier": "▲△", "searched": "◆◇"}


def draw_images(
    summary: Summary, shape: ModelShape, info: Picture, wide: Any
) -> dict[str, str | None]:
    """The page's pictures by name, each wide and for phones; None where there is nothing to show.

    `pareto` is an `<svg>` element, whose marks are links to rows of the table; the slot map of the
    recommended policy, that of text against questions and the map of needles are addresses with PNG
    data in them.

    Args:
        summary: what a run leaves behind.
        shape: the model's sizes.
        info: numbers of the Pareto picture.
        wide: that picture, a figure.
    """
    from kvsearch.report.needles import draw_needles, needle_map
    from kvsearch.report.pareto_figure import draw
    from kvsearch.report.slotmap_png import draw_slots
    from kvsearch.report.tradeoff import draw_tradeoff, tradeoff

    policy, found, both = _mapped(summary), needle_map(summary), tradeoff(summary)
    slots = None if policy is None else slot_map(policy, shape, summary.settings.context)
    images: dict[str, str | None] = {
        "pareto": _linked(svg(wide, "pareto")),
        "pareto_narrow": _linked(svg(draw(info, narrow=True), "narrow")),
    }
    for end, narrow in (("", False), ("_narrow", True)):
        slot_image = None if slots is None else _data(draw_slots(slots, narrow=narrow))
        needle_image = None if found is None else _data(draw_needles(found, narrow=narrow))
        both_image = _data(draw_tradeoff(both, narrow=narrow)) if both else None
        images |= {f"slots{end}": slot_image, f"needles{end}": needle_image}
        images |= {f"tradeoff{end}": both_image}
    return images


def render(
    summary: Summary, shape: ModelShape, images: Mapping[str, str | None], info: Picture
) -> str:
    """The whole `report.html`; it loads nothing from anywhere.

    Args:
        summary: what a run leaves behind.
        shape: the model's sizes.
        images: from `draw_images`.
        info: the picture's numbers, of which the page repeats some.
    """
    return _template("template.html.j2").render(
        model=summary.model.name,
        open=summary.open,
        asked=_asked(summary, shape),
        recommendation=recommendation(summary, shape),
        images=images,
        beyond=", ".join(p.name for p in info.beyond),
        rows=_rows(summary),
        placed=info.placed,
        planned=facts.planned(summary) is not None,
        sizes=bool(info.curves),
        behind=behind_text(summary.behind),
        unused=facts.unused(summary),
        left_out=facts.left_out(summary),
        tokens=facts.scored_tokens(summary),
        w=words_of(summary),
        report_text=info.report_text,
        search_text=info.search_text,
        slots_caption=_slots_caption(summary, shape),
        reach=facts.reach(summary),
        rechecks=summary.rechecks,
        gained=facts.gained(summary) if not summary.open else "",
        interval_text=interval_text,
        verdict=verdict,
        how=_how(summary),
        examples=[_example(e) for e in summary.examples],
        settings=_settings(summary),
    )


def _settings(summary: Summary) -> list[tuple[str, str]]:
    """Everything that was asked, for the end of the page."""
    about = summary.about
    return facts.flat({"model": about["model"], "text": about["text"], **about["settings"]})


def pareto_page(info: Picture, picture: str) -> str:
    """`pareto.html`: the Pareto picture alone, with the policy of the mark that is pointed at.

    It loads nothing from anywhere; without scripts a mark leads to its policy.

    Args:
        info: what is drawn.
        picture: an `<svg>` element, wide.
    """
    return _template("pareto.html.j2").render(info=info, svg=picture)


@cache  # compiling a page takes longer than filling it, and a run writes it again and again
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("kvsearch.report").joinpath(name).read_text("utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, lstrip_blocks=True)
    return page.from_string(source)


def _linked(picture: str) -> str:
    """Trials have no row on this page; their marks lead to the page that has them."""
    return picture.replace('href="#trial-', 'href="pareto.html#trial-')


def _data(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")


def _asked(summary: Summary, shape: ModelShape) -> dict[str, Any]:
    """The question in words."""
    s, rows = summary.settings, Counter(r.windows for r in summary.rows)
    several = len(rows) > 1
    what = words_of(summary).items
    windows = f"{min(rows)} to {max(rows)} {what}" if several else f"{max(rows)} {what}"
    windows = "one window of" if windows == "1 windows of" else windows
    start = f"scored from position {s.score_from:,}" if s.see is None else f"question-{s.see}"
    if several:
        start += ": " + ", ".join(f"{n} on {w}" for w, n in sorted(rows.items()))
    return {
        "text": facts.text_name(summary),
        "bytes": bytes_text(summary.budget_bytes),
        "slots": f"{summary.budget_bytes / shape.budget_bytes(1):,.4g}",
        "layers": shape.layers,
        "full": bytes_text(summary.row("full").bytes_peak),
        "context": f"{s.context:,}",
        "windows": f"{windows} {s.context:,} tokens, {start}",
    }


def _rows(summary: Summary) -> list[dict[str, Any]]:
    """Cells of the table, in the summary's order."""
    files = policy_files(summary.rows)
    several = len({r.tokens for r in summary.rows}) > 1
    words = words_of(summary)
    return [
        {"anchor": f"policy-{i}", "recommended": r.name == summary.recommended}
        | _row(facts.as_planned(r, summary), files[r.name], several, words)
        for i, r in enumerate(summary.rows)
    ]


def _row(row: Row, file: str, several: bool, words: Words) -> dict[str, Any]:
    level, limits = words.level_of(row)
    d = row.decode
    best = None if row.kind == "full" or row.best == row.name else row.dnll_best
    return {
        "name": row.name,
        "kind": row.kind,
        "label": LABEL[row.kind],
        "glyph": _GLYPH[row.kind][0 if row.on_front else 1],
        "on_front": row.on_front,
        "over": not row.within_budget,
        "description": describe(row.policy),
        "json": compact_json(row.policy),
        "file": f"policies/{file}",
        "level": level,
        "level_interval": limits,
        "workloads": [
            f"{k.workload}: lost {interval_text(k.lost)}, {kept_text(k)}" for k in row.workloads
        ],
        "discordant": _discordant(row),
        "n": f"{row.tokens:,}" if several else "",
        "stopped": at_least(row),
        "full": None if row.kind == "full" else interval_text(row.dnll_full).split(" ", 1),
        "best": interval_text(best).split(" ", 1) if best else None,
        "verdict": f"{_SHORT[verdict(best)]} {row.best}" if best else _why_no_best(row),
        "bytes": bytes_text(row.bytes_peak),
        "slots": f"{row.slots16:,.4g}",
        "search": "" if row.search_dnll is None else signed(row.search_dnll),
        "decode": "" if d is None else f"{d.ratio:.2f} [{d.ratio_lo:.2f}, {d.ratio_hi:.2f}]",
        "pairs": "" if d is None else f"{d.pairs} pairs",
    }


def _discordant(row: Row) -> str:
    """Exact answers against the recommended policy's, by McNemar's test."""
    d = row.discordant
    if d is None:
        return ""
    p = "p < 0.001" if d.p < 0.001 else f"p = {d.p:.2g}"
    return f"{d.only_row} it alone, {d.only_recommended} the recommended alone; {p}"


def _why_no_best(row: Row) -> str:
    if row.kind == "full":
        return ""
    return "no other fits" if row.kind == "method" else "none fits"


def _example(e: Example) -> dict[str, Any]:
    """Answers cut where they first differ from the full cache's."""
    plain = next(iter(e.answers.values()))
    cut = []
    for name, said in e.answers.items():
        pairs = zip(said, plain, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(said), len(plain)))
        cut.append((name, said[:same], said[same:]))
    return {"workload": e.workload, "question": e.question, "reference": e.reference, "said": cut}


def _mapped(summary: Summary) -> Policy | None:
    """The policy whose slots are drawn; none where the prompt stays, whose length decides."""
    if summary.recommended is None:
        return None
    policy = summary.row(summary.recommended).policy
    return None if policy.trigger == "generation" else policy


def _slots_caption(summary: Summary, shape: ModelShape) -> str | None:
    policy = _mapped(summary)
    if policy is None:
        return None
    return caption(slot_map(policy, shape, summary.settings.context), policy)


def _how(summary: Summary) -> dict[str, Any]:
    """Counts, texts and the shrinkage from search text to report text."""
    counts = [(STATES.get(state, state), n) for state, n in summary.counts.items() if n]
    drift = [
        r.dnll_full.mean - r.search_dnll
        for r in summary.rows
        if r.kind == "searched" and r.search_dnll is not None
    ]
    shrink = None
    if drift:
        shrink = {"n": len(drift), "mean": signed(sum(drift) / len(drift))}
    return {
        "searched": any(t.kind == "searched" for t in summary.trials),
        "speeds": any(r.decode is not None for r in summary.rows),
        "stopped": any(r.stopped is not None for r in summary.rows),
        "further": len({r.windows for r in summary.rows if r.stopped is None}) > 1,
        "trials": len(summary.trials),
        "compared": len(summary.rows) - 1,
        "blocks": max((r.blocks for r in summary.rows), default=0),
        "mattered": [(k, f"{100 * v:.0f} %") for k, v in list(summary.importances.items())[:6]],
        "search_tokens": f"{sum(t.tokens for t in summary.trials):,}",
        "counts": counts,
        "shrink": shrink,
        "parts": [{"role": p, **getattr(summary.text, p).plain()} for p in facts.PARTS],
        "seconds": None if summary.seconds is None else facts.duration(summary.seconds),
        "open": bool(summary.open),
        "resumed": summary.resumed,
        "impls": sorted({f"{op}: {impl}" for r in summary.rows for op, impl in r.impls.items()}),
    }
