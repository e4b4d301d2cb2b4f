"""Meaning of `choose_slots`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SPOILT = 1 << 62  # puts an order below every other: they are less than 2**61 from 0
_PLACED = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Ask:
    """What one store asks at a compaction.

    Attributes:
        scores: `[B, V, N]` fp32 in order of time, higher is better.
        pools: of each slot before, `[N]` or `[B or 1, V or 1, N]` uint8; those beyond the tiers
            hold 16 bits and count as the best tier.
        gone: slots to drop; there must be as many between sinks and recent window.
        sinks, recent: first and newest slots that are never dropped.
        counts: slots of each tier, the last of which takes what is left; none to place no one.
        fp16_sinks, fp16_recent: first and newest slots that are in no tier.
    """

    scores: Tensor
    pools: Tensor
    gone: int
    sinks: int = 0
    recent: int = 0
    counts: Sequence[int] = ()
    fp16_sinks: int = 0
    fp16_recent: int = 0


Choice = tuple[Tensor, Tensor | None]


def reference(asks: Sequence[Ask]) -> list[Choice]:
    """Drop the worst slots of each store, and give each that stays its tier.

    Sinks and the recent window stay, and come first among the tiers; then the best scores. Of equal
    scores the older slot is dropped first, and is first in the better tier. A tier prefers slots
    that were never stored in a worse one, since what was rounded away does not come back.

    Args:
        asks: of the stores of a layer, each on its own.

    Returns:
        Of each store rising slots that stay `[B, V, N - gone]` int64, and their pools, uint8 alike:
        tiers in order, and `len(counts)` for those in none; None without tiers.
    """
    return [_choice(ask) for ask in asks]


def _choice(ask: Ask) -> Choice:
    """`reference` of one store."""
    scores, n = ask.scores, ask.scores.shape[-1]
    keep = best_between(scores, ask.sinks, n - ask.recent, ask.gone)
    if not ask.counts:
        return keep, None
    old = ask.pools.expand(scores.shape).gather(-1, keep)
    rank = scores.gather(-1, keep)
    native = ask.fp16_sinks, ask.fp16_recent
    return keep, _tiers(rank, old, ask.sinks, ask.recent, ask.counts, *native)


def best_between(scores: Tensor, first: int, last: int, gone: int) -> Tensor:
    """Rising slots `[B, V, N - gone]`: all but the worst `gone` of slots `first` to `last - 1`."""
    n, device = scores.shape[-1], scores.device
    if gone == 0:
        return torch.arange(n, device=device).expand(scores.shape)
    order = _total_order(scores[..., first:last], newest_first=True)
    best = order.topk(order.shape[-1] - gone, sorted=False).indices
    kept = best.sort(-1).values + first
    ends = [torch.arange(first, device=device), torch.arange(last, n, device=device)]
    head, tail = (e.expand(*kept.shape[:-1], -1) for e in ends)
    return torch.cat([head, kept, tail], -1)


def _tiers(
    scores: Tensor, old: Tensor, sinks: int, recent: int, counts: Sequence[int],
    fp16_sinks: int, fp16_recent: int,
) -> Tensor:  # fmt: skip
    """Pool of each slot that stays, see `Ask`."""
    n, device = scores.shape[-1], scores.device
    slot, native_pool = torch.arange(n, device=device), len(counts)
    native = (slot < fp16_sinks) | (slot >= n - fp16_recent)
    rank = scores.clone()
    rank[..., max(0, n - recent) :] = float("inf")
    rank[..., :sinks] = float("inf")
    best = torch.where(old == native_pool, torch.zeros_like(old), old)
    pools = torch.full(rank.shape, native_pool - 1, dtype=torch.uint8, device=device)
    order = _total_order(rank, newest_first=False)
    order.masked_fill_(native, _PLACED)
    for tier, count in enumerate(counts[:-1]):
        spoilt = (best > tier) & (order > _PLACED)
        key = torch.where(spoilt, order - _SPOILT, order)
        chosen = key.topk(count, sorted=False).indices
        pools.scatter_(-1, chosen, tier)
        order.scatter_(-1, chosen, _PLACED)
    return pools.masked_fill_(native, native_pool)


def _total_order(scores: Tensor, *, newest_first: bool) -> Tensor:
    """Integers `[..., N]` that rise with fp32 scores `[..., N]`; the slot decides between equals.

    One integer per slot needs no stable sort, and no sort at all where only the best are asked for.
    """
    slot = torch.arange(scores.shape[-1], device=scores.device)
    slot = slot if newest_first else (1 << 30) - 1 - slot
    return torch.add(slot, rising_bits(scores), alpha=1 << 30)


def rising_bits(scores: Tensor) -> Tensor:
    """Int32 numbers that compare as fp32 `scores` do; both zeros are equal."""
    bits = (scores + 0.0).contiguous().view(torch.int32)  # -0.0 + 0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # below 0, larger bits are smaller numbers
