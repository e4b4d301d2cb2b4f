"""What each layer's slots hold, as numbers that a picture can show. No torch.

A policy that goes by age alone decides without data, so its map is exact: token by token. Where
attention decides, only counts are known in advance, and the map says so.
"""

from dataclasses import dataclass

import numpy as np

from kvsearch.policy import LayerLayout, ModelShape, Policy, layout
from kvsearch.policy.schedule import Ints, pools_by_age
from kvsearch.report.describe import bits_text

Codes = np.ndarray[tuple[int, int], np.dtype[np.uint8]]
GONE, NATIVE, FIRST_TIER = 0, 1, 2
CHOSEN = "chosen by rank"  # role of the slots that the policy's rule picks


@dataclass(frozen=True, eq=False)
class AgeMap:
    """Exact map of a policy that goes by age.

    Attributes:
        codes: `[layers, tokens]`, 0 gone, 1 held in 16 bits, `2 + i` held in tier `i`.
        sinks: first tokens that are never evicted.
        legend: label of each code that occurs, `GONE` excepted.
    """

    codes: Codes
    sinks: int
    legend: dict[int, str]


@dataclass(frozen=True)
class Segment:
    """Neighbouring slots of one layer with one role and one precision, `count` tokens."""

    role: str
    code: int
    count: int


@dataclass(frozen=True)
class SlotBars:
    """Shares of a policy where attention decides, at the fullest moment (just before a compaction).

    Attributes:
        layers: per layer, segments from oldest to newest; they add up to its slots.
        tokens: tokens seen, when nothing is ever evicted; None with a slot limit.
        legend: label of each code that occurs.
    """

    layers: tuple[tuple[Segment, ...], ...]
    tokens: int | None
    legend: dict[int, str]


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
    layers = layout(policy, shape).layers
    if policy.scored:
        return _bars(policy, layers, context)
    return _ages(policy, layers, context)


def _ages(policy: Policy, layers: tuple[LayerLayout, ...], context: int) -> AgeMap:
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
    rows: dict[tuple[int | None, int], Codes] = {}
    for layer in layers:
        key = (layer.slots, layer.offset)
        if key not in rows:
            rows[key] = _codes(layer, tokens, prompt)
    codes = np.stack([rows[layer.slots, layer.offset] for layer in layers])
    return AgeMap(codes, policy.sinks if policy.evicts else 0, _legend(policy, codes))


def _codes(layer: LayerLayout, tokens: int, prompt: int) -> np.ndarray:
    p = layer.policy
    live, compacted = held(layer, tokens, prompt)
    old = int((live < compacted).sum())
    pools = pools_by_age(layer.tier_counts(old), old, p.fp16_recent)
    tiers = [NATIVE if t.native else FIRST_TIER + i for i, t in enumerate(p.tiers)]
    column = [*np.array([*tiers, NATIVE])[pools], *[NATIVE] * (len(live) - old)]
    codes = np.full(tokens, GONE, dtype=np.uint8)
    codes[live] = column
    return codes


def _bars(policy: Policy, layers: tuple[LayerLayout, ...], context: int) -> SlotBars:
    bars = tuple(_segments(layer, context) for layer in layers)
    codes = np.array([[s.code for bar in bars for s in bar]], dtype=np.uint8)
    tokens = context if policy.slots is None else None
    return SlotBars(bars, tokens, _legend(policy, codes))


def _segments(layer: LayerLayout, context: int) -> tuple[Segment, ...]:
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
                code = NATIVE if p.tiers[tier].native else FIRST_TIER + tier
                out.append(Segment(role, code, used))
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


def _legend(policy: Policy, codes: Codes) -> dict[int, str]:
    names = {NATIVE: "16 bit"}
    for i, tier in enumerate(policy.tiers):
        if not tier.native:
            names[FIRST_TIER + i] = bits_text(tier)
    present = set(np.unique(codes).tolist())
    return {code: name for code, name in names.items() if code in present}


def caption(found: AgeMap | SlotBars, policy: Policy) -> str:
    """What a reader must know to read the picture, in two or three sentences."""
    if isinstance(found, AgeMap):
        layers, tokens = found.codes.shape
        share = 100 * float((found.codes != GONE).mean())
        return (
            f"Each line is one of {layers} layers, each column a token of the text, after "
            f"{tokens:,} tokens. Colour says how precisely a token is stored; grey ones are gone. "
            f"{share:.3g} % are held. The rule goes by age alone, so the map is exact for every "
            "text; where a column stands for several tokens, a paler colour means that only some "
            "of them are held."
        )
    chosen = sum(s.count for bar in found.layers for s in bar if s.role == CHOSEN)
    total = sum(s.count for bar in found.layers for s in bar)
    newest = (
        f", then come the newest {policy.interval} tokens in 16 bits" if policy.compacts else ""
    )
    return (
        f"Each line is one of {len(found.layers)} layers at its fullest moment, with the number of "
        f"tokens it holds. The striped {100 * chosen / max(1, total):.3g} % are chosen by the "
        "policy's rule, so which tokens they are depends on the text and may differ "
        f"between heads. {policy.sinks} sinks stand at the left, "
        f"{policy.recent_window} recent tokens at the right{newest}."
    )
