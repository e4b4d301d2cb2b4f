"""A policy in one line of plain English, for hovers, tables and the command line."""

import json
import textwrap
from typing import Any

from kvsearch.policy import Policy, Score, Tier

_TRIGGER = {
    "stream": "",
    "prompt": ", once after the prompt",
    "prompt+stream": ", from the prompt on",
}


def family(policy: Policy) -> str:
    """The published method that a policy resembles most, such as `H2O-like`.

    Only the rule that picks tokens counts, not sizes or precisions.
    """
    if not policy.evicts:
        if not policy.quantizes:
            return "Full cache"
        return "Ranked precision" if len(policy.tiers) > 1 else "Quantised cache"
    if policy.ladder is not None:
        return "Scored ladder" if policy.scored else "LaCache-like"
    if not policy.scored:
        return "StreamingLLM-like" if policy.sinks else "Sliding window"
    assert policy.score is not None
    return _scored_family(policy, policy.score)


def _scored_family(policy: Policy, s: Score) -> str:
    if s.horizon == 1:
        return "TOVA-like"
    if policy.trigger == "prompt":
        return "PyramidKV-like" if policy.layer_budgets.kind == "pyramid" else "SnapKV-like"
    known: dict[tuple[float, float], str] = {
        (0, 0): "H2O-like",
        (0, 1): "Mean-attention",
        (1, 1): "XMU-like",
    }
    return known.get((s.alpha, s.beta), "Attention-scored")


def describe(policy: Policy) -> str:
    """One line that says what a policy keeps, how, and when it decides.

    Counts are tokens per layer; `K4 V4` are bits per stored number of keys and values.
    """
    parts = [tokens_text(policy)]
    if policy.evicts:
        parts.append(f"{policy.slots:,} slots")
    if policy.quantizes:
        parts.append(_precision(policy))
    if policy.compacts:
        step = "token" if policy.interval == 1 else f"{policy.interval} tokens"
        parts.append(f"every {step}{_TRIGGER[policy.trigger]}")
    if policy.scored and policy.score is not None:
        parts += _score(policy, policy.score)
    if policy.evicts:
        parts += _layer_budgets(policy)
        if policy.positions == "cache":
            parts.append("positions re-indexed")
    return f"{family(policy)}: {', '.join(p for p in parts if p)}"


def tokens_text(policy: Policy) -> str:
    """Which tokens stay: `4 sinks + 128 recent_window + best-scored`."""
    if not policy.evicts:
        return "every token kept"
    kept = [f"{policy.sinks} sinks"] if policy.sinks else []
    plain_window = not policy.scored and policy.ladder is None
    if policy.recent_window and not plain_window:
        kept.append(f"{policy.recent_window} recent_window")
    if policy.ladder is not None:
        span, overlap = f"{policy.ladder.span:.2g}", f"{policy.ladder.overlap:.2g}"
        how = "best-scored per rung" if policy.scored else f"{policy.ladder.order} rungs"
        kept.append(f"{how} (span {span}, overlap {overlap})")
    else:
        kept.append("best-scored" if policy.scored else "newest")
    return " + ".join(kept)


def bits_text(tier: Tier) -> str:
    """Precision of one tier: `16 bit` or `K4 V2`."""
    return "16 bit" if tier.native else f"K{tier.key_bits} V{tier.value_bits}"


def _precision(policy: Policy) -> str:
    q = policy.quantizer
    if len(policy.tiers) == 1:
        bits = bits_text(policy.tiers[0])
    else:
        bits = " / ".join(f"{100 * t.share:.3g} % {bits_text(t)}" for t in policy.tiers)
    words = [bits, "rotated" if q.rotate else "", "Lloyd-Max" if q.levels == "lloyd" else ""]
    words.append(f"group {q.group}" if q.group else "one group a head")
    words.append("with 16-bit sinks" if policy.fp16_sinks else "")
    return " ".join(w for w in words if w)


def _score(policy: Policy, s: Score) -> list[str]:
    parts = []
    if family(policy) == "Attention-scored" or policy.ladder is not None or not policy.evicts:
        parts.append(f"score alpha {s.alpha:.3g} beta {s.beta:.3g}")
    if s.horizon is not None and s.horizon > 1:
        over = "over the last" if s.kind == "window" else "decaying over"
        parts.append(f"{over} {s.horizon} queries")
    if s.pool > 1:
        parts.append(f"{s.pool_kind} pool {s.pool}")
    if s.share == "layer":
        parts.append("heads vote together")
    return parts


def _layer_budgets(policy: Policy) -> list[str]:
    layer_budgets = policy.layer_budgets
    if layer_budgets.kind == "sensitivity" and layer_budgets.exponent:
        return ["sensitivity budgets"]
    if layer_budgets.kind == "pyramid" and layer_budgets.beta != 1:
        return [f"pyramid budgets (beta {layer_budgets.beta:.3g})"]
    return []


def compact_json(policy: Policy, width: int | None = None) -> str:
    """The active fields as short JSON; floats at three digits, so the policy file is the record.

    Args:
        policy: what to show.
        width: wrap lines at so many characters; None keeps one line.
    """
    data = policy.model_dump(
        mode="json", by_alias=True, exclude_defaults=True, exclude={"name", "about", "schema_"}
    )
    text = json.dumps(_rounded(data), separators=(", ", ":"))
    return text if width is None else "\n".join(textwrap.wrap(text, width))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value
