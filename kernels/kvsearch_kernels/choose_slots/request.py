"""What `choose_slots` is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """What a rule holds of the slots of a store; it moves with them.

    Attributes:
        sums: of what slots received `[B, V, N]` fp32.
        born: arrival index of each slot's token `[B, V, N]` int32; None if age plays no role.
        seen: tokens of the stream so far: the arrival index of the next.
        forgets: whether all sums begin at 0 again.
        divisors: `[A]` fp32: a score is first divided by that of its slot's age, `seen - born`.
            None: scores are ranks as they are.
    """

    sums: Tensor
    born: Tensor | None
    seen: int
    forgets: bool = False
    divisors: Tensor | None = None


@dataclass(frozen=True)
class Ask:
    """What one store asks at a compaction.

    Attributes:
        scores: `[B, V, N]` fp32 in order of time, higher is better.
        pools: of each slot before, `[N]` or `[B or 1, V or 1, N]` uint8; those beyond the tiers
            hold 16 bits and count as the best tier. None: all slots hold 16 bits.
        gone: slots to drop; there must be as many between sinks and recent window.
        sinks, recent: first and newest slots that are never dropped.
        counts: slots of each tier, the last of which takes what is left; none to place no one.
        fp16_sinks, fp16_recent: first and newest slots that are in no tier.
        room: slots that there will be room for; None: `Choice.source` and `order` are not wanted.
        places: where each slot is when pools follow one another, like `pools`, int64; None: they
            are in order of time.
        after: without `counts`, the pool of each slot that stays `[N - gone]` uint8; None: all are
            in one pool.
        kinds: without `counts`, the number of pools.
        held: the rule's sums, which move with the slots.
    """

    scores: Tensor
    pools: Tensor | None
    gone: int
    sinks: int = 0
    recent: int = 0
    counts: Sequence[int] = ()
    fp16_sinks: int = 0
    fp16_recent: int = 0
    room: int | None = None
    places: Tensor | None = None
    after: Tensor | None = None
    kinds: int = 1
    held: Sums | None = None


@dataclass(frozen=True)
class Choice:
    """What is answered. `N'` slots stay; with `room` there are `C` slots to come, else `N'`.

    Attributes:
        keep: rising slots that stay `[B, V, N']` int64.
        pools: of each `[B, V, C]` uint8: tiers in order, and `len(counts)` for those in none and
            those to come; None without tiers.
        source: where each slot was, pool after pool, when pools followed one another `[B, V, N']`
            int64; None without `room`, as are `order`.
        order: where slots in order of time lie when pools follow one another, new ones behind all
            others `[B, V, C]` int64.
        sums: `[B, V, C]` fp32, 0 of slots to come; None if nothing is held.
        born: `[B, V, C]` int32, those of tokens to come too; None if none are held.
    """

    keep: Tensor
    pools: Tensor | None = None
    source: Tensor | None = None
    order: Tensor | None = None
    sums: Tensor | None = None
    born: Tensor | None = None
