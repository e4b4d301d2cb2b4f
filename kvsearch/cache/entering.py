"""Decoded tokens that go on into their tier at once, where each would be compacted by itself.

A policy that compacts after every token, and has one tier, encodes a token then and drops at most
one slot. On a CPU the op that decodes does that in place, in room behind the slots of the tier:
nothing is described anew until the room is full. Slots, sums and bytes are those of `by_segment`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.formats import Codec, Held
from kvsearch.cache.slots.packed import LEAST, PackedStore
from kvsearch.rules.attention import AttentionScorer, divisors
from kvsearch_kernels.decode_step import Entering
from kvsearch_kernels.packed_attention import Part


@dataclass(frozen=True)
class OpenTier:
    """The tier of some heads, with room.

    Attributes:
        group: these heads.
        held: keys and values, with their room.
        entering: what the op is told.
        last: tokens seen after which its table of ages ends.
    """

    group: HeadGroup
    held: tuple[Held, Held]
    entering: Entering
    last: int | None

    @property
    def part(self) -> Part:
        """Keys and values, as the op takes them."""
        keys, values = self.group.codecs[0]
        return Part(keys.packed(self.held[0]), values.packed(self.held[1]), keys.fmt, values.fmt)

    @property
    def room(self) -> int:
        """Slots that there is room for."""
        return self.held[0][0].shape[2]


def serves(layer: Layer) -> bool:
    """Whether tokens can enter the tiers of all heads at once."""
    p, seen = layer.policy, layer.seen
    if p.interval != 1 or p.anchors is not None or p.refits or layer.adaptive or layer.rereads:
        return False
    if (layer.next_compaction(seen), layer.next_compaction(seen + 1)) != (seen + 1, seen + 2):
        return False
    return all(map(_served, layer.groups))


def _served(group: HeadGroup) -> bool:
    layout, store, scorer = group.layout, group.store, group.scorer
    p, n = layout.policy, group.store.n
    if not isinstance(store, PackedStore) or store.device.type != "cpu" or group.reindex:
        return False
    if not n or store.residual or len(group.codecs) > 2 or layout.tier_counts(n) != (n,):
        return False  # the tier holds all
    if p.tagged or p.fp16_sinks or p.fp16_recent or layout.rungs is not None:
        return False
    if not all(map(_encoded, group.codecs[0])):
        return False
    if layout.target is not None and not p.sinks + p.recent_window <= n <= layout.target:
        return False
    if scorer is None:
        return True
    rule = group.rule
    return (
        isinstance(scorer, AttentionScorer)
        and rule is not None
        and "scan" in rule.fast
        and scorer.blocks == scorer.rule.pool == 1
    )


def _encoded(codec: Codec) -> bool:
    """Whether there is a loop for it."""
    fmt = codec.fmt
    return fmt is None or (fmt.levels == "uniform" and fmt.bits > 1 and fmt.along == "channels")


def opened(group: HeadGroup, seen: int) -> OpenTier:
    """Have room behind the slots of a tier."""
    store, p, target, scorer = group.store, group.layout.policy, group.layout.target, group.scorer
    assert isinstance(store, PackedStore)
    size = store.n + LEAST if target is None else min(target, store.n + LEAST)
    born = ages = None
    if isinstance(scorer, AttentionScorer):
        scorer.running.room(seen, size + 1)
        if scorer.rule.beta:
            born, ages = scorer.running.births, divisors(scorer.rule, store.device, seen + LEAST)
    entering = Entering(
        torch.tensor([store.n]), target, p.sinks, p.recent_window, born, ages,
        forgets=isinstance(scorer, AttentionScorer) and scorer.forgets,
    )  # fmt: skip
    last = None if ages is None else len(ages) - 2
    return OpenTier(group, store.opened(size), entering, last)


def entered(layer: Layer, tiers: Sequence[OpenTier]) -> bool:
    """Count a token that the op has let enter; whether another may come like it."""
    layer.seen += 1
    goes_on = True
    for tier in tiers:
        group, target = tier.group, tier.group.layout.target
        store, n = group.store, group.store.n
        assert isinstance(store, PackedStore)
        group.peak = max(group.peak, group.layout.bytes(n, 1))
        if target is None or n < target:
            store.entered(tier.held, n + 1)
            if group.scorer is not None and group.scorer.running is not None:
                group.scorer.running.count = n + 1
            goes_on &= n + 1 < tier.room or n + 1 == target
        goes_on &= tier.last is None or layer.seen <= tier.last
    return goes_on
