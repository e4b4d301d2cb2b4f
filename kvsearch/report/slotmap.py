"""What each layer's slots hold, as numbers that a picture can show. No torch.

A policy by age evicts whatever the text is, so its map is exact: token by token. Where a rule ranks
the slots, only counts are known in advance, and the caption says so.
"""

from dataclasses import dataclass

import numpy as np

from kvsearch.policy import LayerLayout, ModelShape, Policy, Tier, layout
from kvsearch.policy.schedule import Ints, pools_by_age
from kvsearch.report.describe import bits_text

Codes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
GONE, NATIVE, FIRST_TIER = 0, 1, 2
CHOSEN = "chosen by rank"  # role of the slots that the policy's rule picks


@dataclass(frozen=True, eq=False)
class AgeMap:
    """Exact map of a policy by age.

    Attributes:
        codes: `[rows, tokens]`, a row a layer, or a KV head where heads differ; 0 gone, 1 held in
            16 bits, from 2 on in fewer, the better first.
        sinks: first tokens that are never evicted.
        legend: label of each code that occurs, `GONE` excepted.
        heads: rows that one layer takes.
    """

    codes: Codes
    sinks: int
    legend: dict[int, str]
    heads: int = 1


@dataclass(frozen=True)
class Segment:
    """Neighbouring slots of one layer with one role and one precision, `count` tokens."""

    role: str
    code: int
    count: int


@dataclass(frozen=True)
class SlotBars:
    """Shares of a policy whose rule ranks slots, at the fullest moment (before a compaction).

    Attributes:
        layers: per layer, or per KV head where heads differ, segments from oldest to newest; they
            add up to its slots.
        tokens: tokens seen, when nothing is ever evicted; None with a slot limit.
        legend: label of each code that occurs.
        heads: rows that one layer takes.
    """

    layers: tuple[tuple[Segment, ...], ...]
    tokens: int | None
    legend: dict[int, str]
    heads: int = 1


def held(layer: LayerLayout, tokens: int, prompt: int = 0) -> tuple[Ints, int]:
    """Tokens that one layer of a position-only policy holds after a stream.

    Args:
        layer: integers of the layer.
        tokens: tokens seen.
        prompt: how many of them came as a prompt.

    Returns:
        Held token numbers, rising; and how many tokens had been seen at the last compaction.
    """
    live, cursor = np.empty(0, dtype=np.int64), layer.policy.sinks
    seen = compacted = 0
    while seen < tokens:
        due = layer.clock.after(seen, prompt)
        end = tokens if due is None else min(due, tokens)
        live = np.concatenate([live, np.arange(seen, end, dtype=np.int64)])
        seen = end
        if seen == due:
            compacted = seen
            stays, cursor = layer.evictions.by_age(len(live), cursor)
            live = live if stays is None else live[stays]
    return live, compacted


def slot_map(policy: Policy, shape: ModelShape, context: int) -> AgeMap | SlotBars:
    """The map of a policy on a model, after at most `context` tokens.

    Args:
        policy: what to show.
        shape: model it runs on.
        context: tokens in the cache at deployment.
    """
    heads = shape.kv_heads if policy.per_head else 1
    rows = [
        part for part in layout(policy, shape).layers for _ in (part.heads if heads > 1 else "1")
    ]
    if policy.scored:
        return _bars(policy, rows, heads, context)
    return _ages(policy, rows, heads, context)


def _ages(policy: Policy, layers: list[LayerLayout], heads: int, context: int) -> AgeMap:
    tokens = context
    if policy.slots is not None:  # four cache lengths show the pattern without shrinking it away
        tokens = max(16, min(context, 4 * max(layer.slots or 0 for layer in layers)))
    prompt = 0
    if policy.trigger != "stream":
        prompt = max(1, tokens - policy.interval + 1)
    elif policy.compacts:
        tokens = max(
            1, tokens - tokens % policy.interval - 1
        )  # just before a compaction: the fullest
    tiers = _tier_codes(policy)
    rows: dict[tuple[object, ...], np.ndarray] = {}
    for layer in layers:
        if (key := _kind(layer)) not in rows:
            rows[key] = _codes(layer, tokens, prompt, tiers)
    codes = np.stack([rows[_kind(layer)] for layer in layers])
    return AgeMap(codes, policy.sinks if policy.evicts else 0, _legend(policy, codes), heads)


def _kind(layer: LayerLayout) -> tuple[object, ...]:
    return layer.slots, layer.offset, layer.policy.tiers


TierCodes = dict[tuple[int, int], int]


def _tier_codes(policy: Policy) -> TierCodes:
    """Code of each precision of the policy, the best first."""
    bits = {(t.key_bits, t.value_bits) for tiers in policy.every_tiers for t in tiers}
    low = sorted(bits - {(16, 16)}, key=lambda b: (-b[0] - b[1], -b[0]))
    return {(16, 16): NATIVE, **{b: FIRST_TIER + i for i, b in enumerate(low)}}


def _codes(layer: LayerLayout, tokens: int, prompt: int, codes_of: TierCodes) -> np.ndarray:
    p = layer.policy
    live, compacted = held(layer, tokens, prompt)
    old = int((live < compacted).sum())
    pools = pools_by_age(layer.tier_counts(old), old, p.fp16_recent)
    tiers = [codes_of[t.key_bits, t.value_bits] for t in p.tiers]
    column = [*np.array([*tiers, NATIVE])[pools], *[NATIVE] * (len(live) - old)]
    codes = np.full(tokens, GONE, dtype=np.uint8)
    codes[live] = column
    return codes


def _bars(policy: Policy, layers: list[LayerLayout], heads: int, context: int) -> SlotBars:
    tiers = _tier_codes(policy)
    bars = tuple(_segments(layer, context, tiers) for layer in layers)
    codes = np.array([[s.code for bar in bars for s in bar]], dtype=np.uint8)
    tokens = context if policy.slots is None else None
    return SlotBars(bars, tokens, _legend(policy, codes), heads)


def _segments(layer: LayerLayout, context: int, codes_of: TierCodes) -> tuple[Segment, ...]:
    """Sinks and the recent window fill the best tiers first, the chosen middle gets the rest."""
    p = layer.policy
    full = layer.slots if layer.slots is not None else context
    old = layer.evictions.left(full) if p.compacts else full
    if layer.slots is None:
        old = max(0, full - p.interval)
    room = list(layer.tier_counts(old))

    def take(role: str, count: int) -> list[Segment]:
        out = []
        for tier, left in enumerate(room):
            used = min(left, count)
            if used:
                bits = p.tiers[tier]
                out.append(Segment(role, codes_of[bits.key_bits, bits.value_bits], used))
                room[tier] -= used
                count -= used
        return out

    fixed = min(old, p.fp16_sinks)
    sinks = [Segment("sinks", NATIVE, fixed)] if fixed else take("sinks", min(old, p.sinks))
    kept = min(old - fixed, p.fp16_recent)
    recent = [Segment("recent window", NATIVE, kept)] if kept else []
    recent = recent or take("recent window", min(p.recent_window, sum(room)))
    chosen = take(CHOSEN, sum(room))
    newest = [Segment("newest", NATIVE, full - old)] if full > old else []
    # drawn oldest first; the recent window's worse tiers, if any, belong to their older part
    return (*sinks, *chosen, *reversed(recent), *newest)


def _legend(policy: Policy, codes: np.ndarray) -> dict[int, str]:
    names = {
        code: bits_text(Tier.model_validate(dict(key_bits=k, value_bits=v)))
        for (k, v), code in _tier_codes(policy).items()
    }
    return {code: name for code, name in names.items() if (codes == code).any()}


def _line(found: AgeMap | SlotBars, rows: int) -> str:
    """What a line of the picture is."""
    if found.heads == 1:
        return f"Each line is one of {rows} layers"
    return f"Each line is one of {found.heads} KV heads of one of {rows // found.heads} layers"


def caption(found: AgeMap | SlotBars, policy: Policy) -> str:
    """Explanation of the picture, in two or three sentences."""
    if isinstance(found, AgeMap):
        layers, tokens = found.codes.shape
        share = 100 * float((found.codes != GONE).mean())
        return (
            f"{_line(found, layers)}, each column a token of the text, after "
            f"{tokens:,} tokens. Colour says how precisely a token is stored; grey ones are gone. "
            f"{share:.3g} % are held. The rule goes by age alone, so the map is exact for every "
            "text; where a column stands for several tokens, a paler colour means that only some "
            "of them are held."
        )
    chosen = sum(s.count for bar in found.layers for s in bar if s.role == CHOSEN)
    total = sum(s.count for bar in found.layers for s in bar)
    newest = f", then the newest in 16 bits ({policy.interval})" if policy.compacts else ""
    return (
        f"{_line(found, len(found.layers))} at its fullest moment, with the number of "
        f"tokens it holds. The striped {100 * chosen / max(1, total):.3g} % are chosen by the "
        "policy's rule, so which tokens they are depends on the text and may differ "
        f"between heads. At the left: sinks ({policy.sinks}); at the right: recent tokens "
        f"({policy.recent_window}){newest}."
    )
