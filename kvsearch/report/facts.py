"""Values from the untyped dictionaries of a `Summary` (model, text, settings); keys may be absent.

Keys looked for: `model.name|revision|digest`; `text.search|select|report` with `name`, `tokens`
and `token_sha256`; `settings.context|report_windows|windows|score_from`. Everything, known or
not, is printed as it is in the report's list of settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

from kvsearch.records import Recheck, Row, Summary

PARTS = ("search", "select", "report")


@dataclass(frozen=True)
class TextPart:
    """One of the disjoint texts: its name, number of tokens (None if unknown) and hash."""

    role: str
    name: str
    tokens: int | None
    digest: str | None


STATES = {
    "complete": "measured to the end",
    "pruned": "stopped early",
    "duplicate": "seen before",
    "rejected": "rejected before running",
    "failed": "failed while running",
}

SMALL = "budget too small"  # so begins the reason; the rest of it differs between policies


def text_part(summary: Summary, role: str) -> TextPart:
    """The part of the text with this role."""
    raw = summary.text.get(role)
    if not isinstance(raw, Mapping):
        return TextPart(role, str(raw) if raw else f"{role} text", None, None)
    name = str(raw.get("name") or summary.text.get("name") or f"{role} text")
    tokens = raw.get("tokens")
    digest = raw.get("token_sha256") or raw.get("sha256")
    return TextPart(role, name, int(tokens) if tokens else None, str(digest) if digest else None)


def model_name(summary: Summary) -> str:
    """The model as people call it."""
    return str(summary.model.get("name") or "the model")


def budget_slots(summary: Summary, unit: float) -> float:
    """The budget in fp16 slots per layer; `unit` is the bytes of one such slot in all layers."""
    return summary.budget_bytes / unit


def context(summary: Summary) -> int:
    """Tokens per window at which policies were measured; 4096 when the summary does not say."""
    value = summary.settings.get("context")
    return int(value) if isinstance(value, int | float) and value > 0 else 4096


def full_row(summary: Summary) -> Row | None:
    """The uncompressed cache, against which every difference is taken."""
    return next((r for r in summary.rows if r.kind == "full"), None)


def reach(summary: Summary) -> str:
    """Which published methods a row was compared with, read off the rows themselves."""
    peaks = {row.name: row.bytes_peak for row in summary.rows}
    larger = any(r.best in peaks and peaks[r.best] > r.bytes_peak for r in summary.rows)
    return "within the budget" if larger else "at no more bytes"


def planned(summary: Summary) -> Recheck | None:
    """The one comparison of the headline, if it is with the opponent that the row names."""
    found = summary.against("method")
    same = found is not None and summary.row(found.policy).best == found.against
    return found if same else None


def as_planned(row: Row, summary: Summary) -> Row:
    """The recommended row with the headline's difference to the best published method.

    That of the row holds at once with those of all rows, and so is wider.
    """
    best = planned(summary)
    if best is None or row.name != summary.recommended:
        return row
    return replace(row, dnll_best=best.dnll)


def over_full(row: Row, summary: Summary) -> Row:
    """The recommended row with a loss over the full cache that is one comparison, likewise."""
    full = summary.against("full")
    return row if full is None else replace(row, dnll_full=full.dnll)


def scored_tokens(summary: Summary) -> str:
    """The `n` of the report rows: one number, or its range when rows differ."""
    counts = sorted({row.tokens for row in summary.rows})
    if not counts:
        return "0"
    return f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"


def placed(summary: Summary) -> str:
    """Where rows with fewer tokens than the recommended one stand; empty without such a row."""
    if len({row.tokens for row in summary.rows}) < 2:
        return ""
    return (
        "Rows with fewer tokens than the recommended policy are placed by their paired difference "
        "to it, on the tokens that both have."
    )


def left_out(summary: Summary) -> str:
    """Policies that were to be compared and have no row, by the reason in short; empty without any.

    They are the methods, combinations and earlier policies that were rejected or failed, whatever
    could not be measured on the report text, and the methods that the run was not to compare with.
    """
    why = {
        t.name: t.error or t.state
        for t in summary.trials
        if t.kind != "searched" and t.state in ("rejected", "failed")
    }
    names: dict[str, list[str]] = {}
    for name, reason in (why | summary.dropped).items():
        short = SMALL if reason.startswith(SMALL) else shorten(reason, 100, placeholder=" ...")
        names.setdefault(short, []).append(name)
    if excluded := list(summary.settings.get("exclude_method", ())):
        names["not compared with; see --all-methods"] = excluded
    return "; ".join(f"{', '.join(those)} ({short})" for short, those in names.items())


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as `key.subkey, value` pairs for printing."""
    pairs: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flat(value, f"{name}.")
        elif value is not None:
            pairs.append(
                (
                    name,
                    ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value),
                )
            )
    return pairs


def duration(seconds: float) -> str:
    """Wall time in the unit a person would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
