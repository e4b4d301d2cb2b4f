"""The recommendation of a run: the policy, what it costs, and how to use it."""

import math
from dataclasses import dataclass

from kvsearch.policy import ModelShape
from kvsearch.report import facts
from kvsearch.report.describe import describe
from kvsearch.report.figure import LABEL
from kvsearch.report.tables import (
    bytes_text,
    interval_text,
    percent_text,
    policy_files,
    sizes_text,
    verdict,
)
from kvsearch.report.words import FACTS, MIXED, TEXT, Words, words_of
from kvsearch.results.limits import far_behind, judged
from kvsearch.results.records import Interval, Row
from kvsearch.results.summary import Summary

PYTHON = """\
from kvsearch import PolicyCache
cache = PolicyCache.from_json("{file}", model)
model.generate(**inputs, past_key_values=cache)"""
_WAY = {True: "above", False: "below"}
SHELL = "kvsearch export {file} --to {target}"


@dataclass(frozen=True)
class Figure:
    """One number: what it is, its value, its uncertainty or unit, its meaning."""

    label: str
    value: str
    uncertainty: str
    note: str


@dataclass(frozen=True)
class Recommendation:
    """The recommended policy in words; `name` is None when there is none.

    Attributes:
        sentence: the policy in one line, or why there is none.
        label: where it is from.
        costs: what it saves and loses, in plain sentences.
        judgement: whether that is within the limits, likewise.
        holds: whether it is, at least on the mean.
    """

    name: str | None
    sentence: str
    label: str = ""
    costs: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    python: str = ""
    shell: str = ""
    judgement: tuple[str, ...] = ()
    holds: bool = True


def recommendation(summary: Summary, shape: ModelShape) -> Recommendation:
    """Words and numbers of the recommendation.

    Args:
        summary: what a run leaves behind.
        shape: the model's sizes, for the budget in slots.
    """
    if summary.recommended is None:
        return Recommendation(None, _nothing(summary, shape))
    row = facts.over_full(summary.row(summary.recommended), summary)
    file = f"policies/{policy_files(summary.rows)[row.name]}"
    figures = (
        _level(row, words_of(summary)),
        _against_full(row, words_of(summary)),
        _against_best(row, summary),
        _bytes(row, summary.row("full")),
        _speed(row),
    )
    return Recommendation(
        row.name,
        describe(row.policy),
        LABEL[row.kind],
        costs(summary),
        figures,
        PYTHON.format(file=file),
        SHELL.format(file=file, target=summary.settings.target or "transformers"),
        judgement(summary),
        (found := judged(summary)) is None or found.holds != "no",
    )


def _nothing(summary: Summary, shape: ModelShape) -> str:
    slots = summary.budget_bytes / shape.budget_bytes(1)
    limit = f"{bytes_text(summary.budget_bytes)} ({slots:,.4g} slots)"
    fit, all_rows = sum(r.within_budget for r in summary.rows), len(summary.rows)
    if fit:
        return f"{fit} of the {all_rows} policies measured fit in {limit}, but none was chosen."
    return (
        f"None of the {all_rows} policies measured on the report text fits in {limit}. Raise "
        "the budget, or widen the search space."
    )


def costs(summary: Summary) -> tuple[str, ...]:
    """What a person decides by: bytes, the loss, the best published method, sizes and facts."""
    if summary.recommended in (None, "full"):
        return ()
    full = summary.row("full")
    row = facts.over_full(summary.row(summary.recommended), summary)
    w = words_of(summary)
    text = w is TEXT
    saved = (
        f"One sequence takes at most {bytes_text(row.bytes_peak)} of KV cache instead of "
        f"{bytes_text(full.bytes_peak)}"
    )
    said = [f"{saved}, and {_change(row.dnll_full, 'the full cache', text)}."]
    if w is MIXED:
        said = [f"{saved}; {_kept(row, full)}."]
    if again := second_reading(summary):
        said.append(again)
    found = summary.against("method")
    if found is not None and found.against != row.name:
        change = _change(found.dnll, f"{found.against}, the best published method", text)
        said.append(f"{change[0].upper()}{change[1:]}.")
    if more := sizes_text(summary):
        said.append(f"{more[0].upper()}{more[1:]}.")
    return tuple(said)


def judgement(summary: Summary) -> tuple[str, ...]:
    """Whether the recommended policy is within the limits, and what would be, if it is not."""
    found = judged(summary)
    if found is None:
        return ()
    said = [f"{found.text[0].upper()}{found.text[1:]}."]
    if found.bytes is not None and summary.recommended is not None:
        row = summary.row(summary.recommended)
        slots = row.slots16 * found.bytes / row.bytes_peak
        said.append(
            f"Of the sizes of it that were measured, the smallest within the limits takes "
            f"{bytes_text(found.bytes)}: --budget {slots:.0f}."
        )
    elif found.holds == "no":
        said.append("No size of it that was measured is within the limits.")
    if behind := far_behind(summary):
        said.append(f"{behind[0].upper()}{behind[1:]}.")
    return tuple(said)


def second_reading(summary: Summary) -> str:
    """What the recommended policy costs before an answer, where it reads a prompt twice."""
    if summary.recommended is None or not summary.row(summary.recommended).policy.rereads:
        return ""
    said = "It reads a prompt twice, so that a prefill takes about twice as long."
    others = (r for r in summary.rows if r.within_budget and r.kind != "full")
    once = [r for r in others if not r.policy.rereads]
    if not once:
        return said
    best, loss = min(once, key=lambda r: r.nll), words_of(summary).loss
    return (
        f"{said} Of the policies that read it once, {best.name} loses least: {loss} "
        f"{best.dnll_full}."
    )


def _kept(row: Row, full: Row) -> str:
    """What is kept of a text and of what is asked, in words."""
    said = list[str]()
    if (read := row.text) is not None and read.dnll is not None:
        said.append(_change(read.dnll, "the full cache", True))
    by_name = {k.workload: k for k in full.asked}
    for k in row.asked:
        assert k.exact is not None, "where something is asked"
        its = by_name[k.workload]
        assert its.exact is not None, "the same is asked"
        what = k.workload if k.workload == FACTS else f"answers to {k.workload}"
        whole = f"{round(its.exact.mean * its.asks)} of {its.asks}"
        said.append(
            f"of {k.asks} {what} asked for later it gives {round(k.exact.mean * k.asks)} (the "
            f"full cache {whole})"
        )
    return "; ".join(said)


def _change(d: Interval, other: str, text: bool) -> str:
    """A loss in per cent, of perplexity or of the context; no direction where zero is inside."""
    if verdict(d) == "no clear difference":
        return f"the loss is not distinguishable from that of {other}"
    size = math.expm1(min(abs(d.mean), 20.0)) if d.mean > 0 else -math.expm1(-abs(d.mean))
    if not text:
        return f"the loss is {100 * abs(d.mean):.0f} % of the context {_WAY[d.mean > 0]} {other}'s"
    return f"the perplexity is {100 * size:.1f} % {_WAY[d.mean > 0]} that of {other}"


def _level(row: Row, words: Words) -> Figure:
    value, limits = words.level_of(row)
    if row.exact is not None:
        asks = sum(k.asks for k in row.asked)
        return Figure("Exact answers", value, f"95 % {limits}", f"n = {asks} answers of the report")
    if words is not TEXT:
        return Figure("Exact answers", "not measured", "", "they are, once the report part is")
    return Figure(
        "Perplexity", value, f"95 % {limits}", f"n = {row.tokens:,} tokens of the report text"
    )


def _against_full(row: Row, words: Words) -> Figure:
    d = row.dnll_full
    if row.kind == "full":
        return Figure("Loss over the full cache", "itself", "", "nothing is dropped or rounded")
    return _difference(row.tokens, d, "the full cache", "the full cache", words)


def _against_best(row: Row, summary: Summary) -> Figure:
    label = "Loss over published methods"
    if row.best == row.name or (row.dnll_best is None and row.kind == "method"):
        return Figure(label, "itself", "", "the only published method in reach")
    if row.dnll_best is None or row.best is None:
        return Figure(label, "none fits", "", "no published method measured here is as small")
    found = summary.against("method")  # one comparison; the row's own is widened for all rows
    against, d, n = row.best, row.dnll_best, row.tokens
    if found is not None:
        against, d, n = found.against, found.dnll, found.tokens
    size = "".join(f" ({bytes_text(r.bytes_peak)})" for r in summary.rows if r.name == against)
    opponent = f"{against}, the best published method {facts.reach(summary)}{size}"
    return _difference(n, d, against, opponent, words_of(summary))


def _difference(n: int, d: Interval, short: str, opponent: str, words: Words) -> Figure:
    """One paired difference; only an interval without zero gets a direction."""
    word = verdict(d)
    sentence = f"{word.capitalize()} {'to' if word == 'no clear difference' else 'than'} {opponent}"
    mean, _, limits = interval_text(d).partition(" ")
    change = f"; PPL {percent_text(d)}" if words is TEXT else ""
    return Figure(
        f"Loss over {short}",
        mean,
        f"95 % {limits}",
        f"{words.unit}, n = {n:,}{change}. {sentence}.",
    )


def _bytes(row: Row, full: Row) -> Figure:
    share = f"{100 * row.bytes_peak / full.bytes_peak:.3g} % of the full cache's "
    share += f"{bytes_text(full.bytes_peak)}; "
    return Figure(
        "Memory per sequence",
        bytes_text(row.bytes_peak),
        "peak, exact",
        f"{share}as much as {row.slots16:,.4g} fp16 slots a layer",
    )


def _speed(row: Row) -> Figure:
    d = row.decode
    if d is None:
        return Figure("Decode speed", "not measured", "", "kvsearch bench measures it")
    return Figure(
        "Decode speed",
        f"{d.ratio:.2f} \N{MULTIPLICATION SIGN}",
        f"quartiles [{d.ratio_lo:.2f}, {d.ratio_hi:.2f}]",
        f"{d.tokens_per_s:,.4g} against {d.full_tokens_per_s:,.4g} tokens/s of the full cache, "
        f"{d.pairs} interleaved pairs at {d.context:,} tokens, {d.device}",
    )
