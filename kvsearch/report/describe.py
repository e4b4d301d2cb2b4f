"""A policy in one line of plain English, for hovers, tables and the command line."""

import json

from kvsearch.policy import Policy, Tier
from kvsearch.policy.channels import ALL, NONE
from kvsearch.rules import Attention, Rule

_TRIGGER = {
    "stream": "",
    "prompt+stream": ", from the prompt on",
    "generation": " after the prompt, which stays",
}


def family(policy: Policy) -> str:
    """The published method that a policy resembles most, such as `H2O-like`.

    Only the rule that picks tokens counts, not sizes or precisions.
    """
    if not policy.evicts:
        if policy.drops:
            return "AnLLM-like"
        if not policy.quantizes:
            return "Pruned channels" if policy.channels.active else "Full cache"
        return "Ranked precision" if policy.ranks_tiers else "Quantised cache"
    if policy.ladder is not None:
        return "Scored ladder" if policy.scored else "LaCache-like"
    if not policy.scored:
        return "StreamingLLM-like" if policy.sinks else "Sliding window"
    rule = policy.active_rule
    assert rule is not None
    if policy.trigger == "prompt" and rule.name == "attention":
        return "PyramidKV-like" if policy.budgets.kind == "pyramid" else "SnapKV-like"
    return rule.family()


def describe(policy: Policy) -> str:
    """One line: which tokens a policy keeps, in which precision, and when it compacts.

    Counts are tokens per KV head; `K4 V4` are bits per stored number of keys and values.
    """
    parts = [tokens_text(policy), _anchors(policy)]
    if policy.evicts:
        beside = " beside the prompt" if policy.trigger == "generation" else ""
        parts.append(f"{policy.slots:,} slots{beside}")
    if policy.quantizes:
        parts.append(_precision(policy))
    if policy.channels.active:
        parts.append(_channels(policy))
    if policy.compacts and policy.trigger == "prompt":
        parts.append("once after the prompt" + ", which is read twice" * policy.rereads)
        if policy.refits:
            biased = policy.refit == "values+bias"
            parts.append("values" + " and biases" * biased + " fitted to all of it")
    elif policy.compacts:
        step = "token" if policy.interval == 1 else f"{policy.interval} tokens"
        parts.append(f"every {step}{_TRIGGER[policy.trigger]}")
    if policy.active_rule is not None:
        parts += _ranking(policy, policy.active_rule)
    if policy.evicts:
        parts += _budgets(policy)
        if policy.positions == "cache":
            parts.append("positions re-indexed")
    return f"{family(policy)}: {', '.join(p for p in parts if p)}"


def tokens_text(policy: Policy) -> str:
    """Which tokens stay, such as `4 sinks + 128 recent + best-scored`."""
    if not policy.evicts:
        return "anchors and the open sequence" if policy.drops else "every token kept"
    kept = [f"{policy.sinks} sinks"] if policy.sinks else []
    plain_window = not policy.scored and policy.ladder is None
    if policy.recent_window and not plain_window:
        kept.append(f"{policy.recent_window} recent")
    if policy.ladder is not None:
        span, overlap = f"{policy.ladder.span:.2g}", f"{policy.ladder.overlap:.2g}"
        how = "best-scored per rung" if policy.scored else f"{policy.ladder.order} rungs"
        kept.append(f"{how} (span {span}, overlap {overlap})")
    else:
        kept.append("best-scored" if policy.scored else "newest")
    return " + ".join(kept)


def bits_text(tier: Tier) -> str:
    """Precision of one tier, such as `16 bit` or `K4 V2`."""
    return "16 bit" if tier.native else f"K{tier.key_bits} V{tier.value_bits}"


def _anchors(policy: Policy) -> str:
    """What is an anchor, and what it does."""
    a = policy.anchors
    if a is None:
        return ""
    at = "by ids" if a.at == "given" else "between sentences"
    if isinstance(a.at, int):
        at = f"every {a.at} tokens"
    elif a.at == "marks":
        at = f"at {' '.join(a.marks)}"
    words = [f"{'new ' if a.insert else ''}anchors {at}", "" if a.close else "that drop nothing"]
    words.append("" if a.isolate else "that see each other")
    return " ".join(w for w in words if w)


def _precision(policy: Policy) -> str:
    q = policy.quantizer
    bits = " or ".join(_tiers(tiers) for tiers in policy.every_tiers)
    if policy.head_tiers is not None:
        bits += " by head" if policy.head_tiers.per_head else " by layer"
    keys, values = (book.words for book in q.books)
    rotated = "keys rotated" if q.value_block == 1 else "rotated"
    words = [bits, rotated if q.rotate else "", keys]
    words.append(f"with {values or 'uniform'} values" if values != keys else "")
    if q.rotate and (q.value_block or 1) > 1:
        words.append(f"values in blocks of {q.value_block}")
    if q.scaled:
        words.append(f"group {q.group}" if q.group else "one group a head")
    if policy.offset is not None:
        scaled = " and scaled" if policy.offset.scales else ""
        words.append(f"keys without their offset{scaled}")
    words.append("along tokens for keys" if q.along == "tokens" else "")
    words.append("with 16-bit sinks" if policy.fp16_sinks else "")
    words.append("with a 16-bit recent window" if policy.fp16_recent else "")
    return " ".join(w for w in words if w)


def _tiers(tiers: tuple[Tier, ...]) -> str:
    if len(tiers) == 1:
        return bits_text(tiers[0])
    return " / ".join(f"{100 * t.share:.3g} % {bits_text(t)}" for t in tiers)


def _channels(policy: Policy) -> str:
    """In how many layers something is removed; how much, only the model's shape could tell."""
    channels = policy.channels
    layers = range(max(len(channels.qk), len(channels.vo)))
    gone = sum(map(channels.removed, layers))
    kept = ({channels.word("qk", i), channels.word("vo", i)} for i in layers)
    fewer = sum(words not in ({ALL}, {NONE}) for words in kept)
    counts = ((gone, "without attention"), (fewer, "with fewer channels"))
    parts = [f"{n} of {len(layers)} layers {what}" for n, what in counts if n]
    return " and ".join(parts)


def _ranking(policy: Policy, rule: Rule) -> list[str]:
    unnamed = policy.ladder is not None or not policy.evicts
    parts = [f"ranked as {rule.family()}"] if unnamed else []
    if isinstance(rule, Attention) and family(policy) in ("Attention-scored", "VATP-like"):
        parts.append(f"score alpha {rule.alpha:.3g} beta {rule.beta:.3g}")
    return parts + rule.words()


def _budgets(policy: Policy) -> list[str]:
    budgets = policy.budgets
    if budgets.kind == "sensitivity" and budgets.exponent:
        return [f"budgets by {'head' if budgets.per_head else 'layer'} sensitivity"]
    if budgets.kind == "adakv":
        return [f"heads share their {budgets.across}'s budget"]
    if budgets.kind == "pyramid" and budgets.beta != 1:
        return [f"pyramid budgets (beta {budgets.beta:.3g})"]
    return []


def compact_json(policy: Policy) -> str:
    """The active fields as short JSON; floats at three digits, so the policy file is the record."""
    data = {k: v for k, v in policy.plain().items() if k not in ("name", "about", "schema")}
    rounded = json.loads(json.dumps(data), parse_float=lambda x: float(f"{float(x):.3g}"))
    return json.dumps(rounded, separators=(", ", ":"))
