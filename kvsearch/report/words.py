"""What a report is about, in words: a text whose tokens are scored, or prompts and answers."""

import math
from dataclasses import dataclass, replace

from kvsearch.report.tables import ppl_interval, ppl_text
from kvsearch.results.records import Row
from kvsearch.results.summary import Summary


@dataclass(frozen=True)
class Words:
    """Words of a report.

    Attributes:
        loss: the difference to the full cache.
        unit: of it.
        above: the loss, in the words of an axis.
        level: what a policy reaches by itself.
        material: what policies are measured on.
        these: the same that was measured.
        items: what it comes in, before a length.
        longest: what the length is of.
        report: the part for the report.
        count: what `n` counts.
        paired: how differences are paired.
        blocks: what intervals count as independent.
        terms: of the glossary, with what each means.
    """

    loss: str
    unit: str
    above: str
    level: str
    material: str
    these: str
    items: str
    longest: str
    report: str
    count: str
    paired: str
    blocks: str
    terms: tuple[tuple[str, str], ...]

    def level_of(self, row: Row) -> tuple[str, str]:
        """What a row reaches by itself, and its 95 % interval."""
        if row.exact is not None:
            lo, hi = 100 * row.exact.lo, 100 * row.exact.hi
            return f"{100 * row.exact.mean:.0f} %", f"[{lo:.0f}, {hi:.0f}]"
        if self.level != "PPL":  # an unfinished run has losses of the search part only
            return "-", ""
        lo, hi = ppl_interval(row)
        known = math.isfinite(lo) and lo < hi
        return ppl_text(row.ppl), f"[{ppl_text(lo)}, {ppl_text(hi)}]" if known else "no interval"


FACTS = "facts"  # the workload that a run adds to a text
TEXT = Words(
    loss="dNLL",
    unit="nats per token",
    above="extra loss over the full cache: dNLL (nats per token)",
    level="PPL",
    material="text",
    these="this text",
    items="windows of",
    longest="window",
    report="report text",
    count="scored tokens",
    paired="both caches predict the same tokens, and the loss is subtracted token by token",
    blocks="blocks of neighbouring tokens",
    terms=(
        (
            "NLL, PPL",
            "mean negative log-likelihood in nats per token, and its exponential, perplexity",
        ),
        (
            "dNLL",
            "NLL of one policy minus that of another on the same tokens; 0.01 is about 1 % of PPL",
        ),
    ),
)
PROMPTS = Words(
    loss="context lost",
    unit="share of the context",
    above="context lost: 0 is the full cache, 1 is no context",
    level="exact",
    material="prompts",
    these="these prompts",
    items="contexts of up to",
    longest="longest prompt",
    report="report prompts",
    count="contexts",
    paired="both caches are asked the same, and the loss is subtracted context by context",
    blocks="documents",
    terms=(
        (
            "context lost",
            "rise of the answers' mean negative log-likelihood over the full cache, as a share of "
            "the rise without the context",
        ),
        (
            "exact",
            "share of answers that greedy decoding gives, every token given the answer before it",
        ),
        (
            "flips, KL",
            "share of the answers' tokens whose most likely token is not the full cache's; mean "
            "divergence of next-token probabilities from the full cache's there, in nats",
        ),
        (
            "it alone, the recommended alone",
            "answers that one of the two gives and the other does not, with McNemar's exact test "
            "of equal counts, by document",
        ),
        (
            "question-agnostic, question-aware",
            "the question arrives after the context was compressed; both are one prompt",
        ),
    ),
)


MIXED = replace(
    PROMPTS,
    material="text and prompts",
    items="windows and contexts of up to",
    report="the report part",
    count="windows and contexts",
    paired="both caches read and are asked the same, and the loss is subtracted item by item",
    blocks="windows and documents",
    terms=(
        (
            "context lost",
            "rise of the negative log-likelihood over the full cache, as a share of the rise "
            "without the context: of answers, that without any; of a text, that with its last few "
            "tokens. The weighted mean over workloads",
        ),
        *TEXT.terms,
        *PROMPTS.terms[1:],
    ),
)


def words_of(summary: Summary) -> Words:
    """Of a summary."""
    s = summary.settings
    return TEXT if s.see is None else MIXED if s.windowed else PROMPTS
