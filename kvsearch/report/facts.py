"""Values that several parts of a report show, from a `Summary`."""

from collections.abc import Mapping
from dataclasses import replace
from textwrap import shorten
from typing import Any

from kvsearch.report.words import words_of
from kvsearch.results.records import Recheck, Row
from kvsearch.results.summary import Summary

PARTS = ("search", "select", "report")
STATES = {
    "complete": "measured to the end",
    "pruned": "stopped early",
    "duplicate": "seen before",
    "rejected": "rejected before running",
    "failed": "failed while running",
}

SMALL = "budget too small"  # so begins the reason; the rest of it differs between policies


def text_name(summary: Summary, role: str = "report") -> str:
    """Name of a part of the text, or of prompts."""
    return str(getattr(summary.text, role).name)


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


def gained(summary: Summary) -> str:
    """What proposals gained over the best policy that the search began with; empty if not known."""
    done = sum(t.kind == "searched" and t.state == "complete" for t in summary.trials)
    if not done:
        return "no policy was proposed beyond those that the search began with"
    if (found := summary.gain) is None:
        return ""
    unsure = " (no clear difference)" if found.dnll.undecided else ""
    best = f"the best of {done} proposals" if done > 1 else "the one proposal"
    return (
        f"{best}, {found.policy}, against the best policy that the search began with, "
        f"{found.against}: {words_of(summary).loss} {found.dnll}{unsure}, n = {found.tokens:,}"
    )


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
    if excluded := summary.settings.exclude_method:
        names["not compared with; see --all-methods"] = excluded
    return "; ".join(f"{', '.join(those)} ({short})" for short, those in names.items())


def unused(summary: Summary) -> str:
    """Workloads that were asked for and are not measured, and why; empty without any."""
    return "; ".join(f"{name}: {why}" for name, why in summary.settings.left_out.items())


def flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as `key.subkey, value` pairs for printing."""
    pairs: list[tuple[str, str]] = []
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            pairs += flat(value, f"{name}.")
        elif value is not None:
            listed = isinstance(value, list | tuple)
            pairs.append((name, ", ".join(map(str, value)) if listed else str(value)))
    return pairs


def duration(seconds: float) -> str:
    """Wall time in the unit a person would use."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
