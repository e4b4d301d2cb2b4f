"""Meaning of `choose_slots`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.choose_slots.request import Ask, Choice, Sums

_SPOILT = 1 << 62  # puts an order below every other: they are less than 2**61 from 0
_PLACED = torch.iinfo(torch.int64).min


def reference(asks: Sequence[Ask]) -> list[Choice]:
    """Drop the worst slots of each store, and give each that stays its tier and its place.

    Sinks and the recent window stay, and come first among the tiers; then the best scores. Of equal
    scores the older slot is dropped first, and is first in the better tier. A tier prefers slots
    that were never stored in a worse one, since what was rounded away does not come back.

    Args:
        asks: of the stores of a layer, each on its own.

    Returns:
        Of each store who stays, and where.
    """
    return [_choice(ask) for ask in asks]


def _choice(ask: Ask) -> Choice:
    """`reference` of one store."""
    scores, n = ranks(ask), ask.scores.shape[-1]
    keep = best_between(scores, ask.sinks, n - ask.recent, ask.gone)
    if not ask.counts:
        return completed(ask, keep, None)
    before = scores.new_zeros(n, dtype=torch.uint8) if ask.pools is None else ask.pools
    old = before.expand(scores.shape).gather(-1, keep)
    rank = scores.gather(-1, keep)
    native = ask.fp16_sinks, ask.fp16_recent
    return completed(ask, keep, _tiers(rank, old, ask.sinks, ask.recent, ask.counts, *native))


def ranks(ask: Ask) -> Tensor:
    """Scores `[B, V, N]`, divided by what belongs to the slots' ages."""
    held = ask.held
    if held is None or held.born is None or held.divisors is None:
        return ask.scores
    return ask.scores / held.divisors[held.seen - held.born.long()]


def completed(ask: Ask, keep: Tensor, tiers: Tensor | None) -> Choice:
    """The answer, given the slots that stay and their tiers `[B, V, N']`."""
    n = keep.shape[-1]
    room, source, order = n, None, None
    if ask.room is not None:
        room, pools = ask.room, ask.after if tiers is None else tiers
        source, order = keep, torch.arange(room, device=keep.device).expand(*keep.shape[:2], -1)
        if ask.places is not None:
            source = ask.places.expand(ask.scores.shape).gather(-1, keep)
        if pools is not None:
            by_pool = pools.expand(keep.shape).argsort(dim=-1, stable=True)
            source = source.gather(-1, by_pool)
            order = order.clone().scatter_(-1, by_pool, order[..., :n])
    if tiers is not None and room > n:
        tiers = torch.constant_pad_nd(tiers, (0, room - n), len(ask.counts))
    return Choice(keep, tiers, source, order, *_moved(ask.held, keep, room))


def _moved(held: Sums | None, keep: Tensor, room: int) -> tuple[Tensor | None, Tensor | None]:
    """Sums and births of the slots that stay, and of those to come."""
    if held is None:
        return None, None
    n = keep.shape[-1]
    sums = held.sums.new_zeros(*held.sums.shape[:-1], room)
    if not held.forgets:
        sums[..., :n] = held.sums.gather(-1, keep)
    if held.born is None:
        return sums, None
    born = held.born.new_empty(*held.born.shape[:-1], room)
    born[..., :n] = held.born.gather(-1, keep)
    if room > n:
        born[..., n:] = torch.arange(
            held.seen, held.seen + room - n, dtype=born.dtype, device=born.device
        )
    return sums, born


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
