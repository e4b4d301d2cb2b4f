"""What one compaction drops, and the pool of every slot that stays."""

import torch
from torch import Tensor

from kvsearch.cache.book import ScoreBook
from kvsearch.cache.store import Store, gather_flat
from kvsearch.policy import LayerLayout


def survivors(
    layer: LayerLayout, n: int, cursor: int, scores: Tensor | None, device: torch.device
) -> tuple[Tensor | None, int]:
    """Slots that survive a compaction.

    Args:
        layer: integers of the layer.
        n: tokens held.
        cursor: first slot that the ladder's present pass has not thinned.
        scores: `[B, V, N]`, higher is better, or None to go by age.
        device: where the index is needed.

    Returns:
        Rising slot indices, `[N']` or `[B, V, N']`, or None when all stay; and the new cursor.
    """
    target = layer.target
    if target is None or n <= target:
        return None, cursor
    if layer.rungs is not None:
        return _ladders(layer, n, cursor, scores, device)
    p = layer.policy
    drop = n - target
    if scores is None:
        slots = torch.arange(n - drop, device=device)
        return torch.where(slots < p.sinks, slots, slots + drop), cursor
    last = n - p.recent_window
    order = _total_order(scores[..., p.sinks : last], newest_first=True)
    best = order.topk(order.shape[-1] - drop, sorted=False).indices
    kept = best.sort(-1).values + p.sinks
    ends = [torch.arange(p.sinks, device=device), torch.arange(last, n, device=device)]
    head, tail = (e.expand(*kept.shape[:-1], -1) for e in ends)
    return torch.cat([head, kept, tail], -1), cursor


def _ladders(
    layer: LayerLayout, n: int, cursor: int, scores: Tensor | None, device: torch.device
) -> tuple[Tensor, int]:
    """Lay ladders from the cursor on until the target is met (LaCache's iterative compaction)."""
    p, rung, target = layer.policy, layer.rungs, layer.target
    assert rung is not None and target is not None
    index = torch.arange(n, device=device)
    if scores is not None:
        index = index.expand(*scores.shape[:-1], -1)
    cursor = max(cursor, p.sinks)
    while n > target:
        if n - 1 - cursor - layer.spared < rung.A:
            cursor = p.sinks
        block = index[..., cursor : cursor + rung.B]
        if scores is None:
            kept = block[layer.offset : layer.offset + rung.A]
        else:
            best = scores.gather(-1, block).sort(dim=-1, stable=True).indices[..., rung.R :]
            kept = block.gather(-1, best.sort(-1).values)
        index = torch.cat([index[..., :cursor], kept, index[..., cursor + rung.B :]], -1)
        cursor += rung.A
        n -= rung.R
    return index, cursor


_SPOILT, _PLACED = 1 << 61, -(1 << 62)  # below every order, and below every spoilt one


def _total_order(scores: Tensor, *, newest_first: bool) -> Tensor:
    """Integers `[..., N]` that rise with scores `[..., N]`, which are fp32 and not negative.

    Their bits rise as they do; the slot decides between equals. One integer per slot needs no
    stable sort, and no sort at all where only the best are asked for.
    """
    slot = torch.arange(scores.shape[-1], device=scores.device)
    slot = slot if newest_first else (1 << 30) - 1 - slot
    return torch.add(slot, scores.contiguous().view(torch.int32), alpha=1 << 30)


def assign_pools(
    layer: LayerLayout, n: int, old: Tensor, scores: Tensor | None, device: torch.device
) -> Tensor:
    """Pool of each of the `n` slots left by a compaction, `[N]` or `[B, V, N]` uint8.

    Without scores the newest tokens are in the best tier. With scores, sinks and recent_window come
    first, then the best scores; a tier prefers tokens that were never stored in a worse one, since
    what was rounded away does not come back.

    Args:
        layer: integers of the layer.
        n: tokens left.
        old: pools before the compaction, same slots; residual tokens count as the best tier.
        scores: `[B, V, N]` of the same slots, or None.
        device: where the result is needed.
    """
    p = layer.policy
    counts = layer.tier_counts(n)
    residual_pool = len(p.tiers)
    fixed = min(n, p.fp16_sinks)
    if scores is None or len(counts) == 1:
        by_age = torch.full((n,), residual_pool, dtype=torch.uint8, device=device)
        end = n
        for tier, count in enumerate(counts):  # newest first
            by_age[end - count : end] = tier
            end -= count
        return by_age
    rank = scores.clone()
    rank[..., n - p.recent_window :] = float("inf")
    rank[..., : p.sinks] = float("inf")
    best = torch.where(old == residual_pool, torch.zeros_like(old), old).expand(rank.shape)
    pools = torch.full(rank.shape, len(counts) - 1, dtype=torch.uint8, device=device)
    order = _total_order(rank, newest_first=False)
    order[..., :fixed] = _PLACED
    for tier, count in enumerate(counts[:-1]):
        spoilt = (best > tier) & (order >= 0)
        key = torch.where(spoilt, order - _SPOILT, order)
        chosen = key.topk(count, sorted=False).indices
        pools.scatter_(-1, chosen, tier)
        order.scatter_(-1, chosen, _PLACED)
    pools[..., :fixed] = residual_pool
    return pools


def compact(layer: LayerLayout, store: Store, book: ScoreBook | None, seen: int, cursor: int) -> int:
    """Compact one layer after its `seen`-th token; returns the new cursor."""
    device, old, scores = store.device, store.slot_pools(), None
    if book is not None:
        scores = book.ranks(seen, store.n - layer.policy.recent_window)
    keep, cursor = survivors(layer, store.n, cursor, scores, device)
    if keep is not None:
        old = gather_flat(old, keep)
        scores = None if scores is None else gather_flat(scores, keep)
    n = store.n if keep is None else keep.shape[-1]
    ranked = scores if layer.policy.tagged else None
    store.compact(keep, assign_pools(layer, n, old, ranked, device))
    if book is not None:
        book.keep(keep)
    return cursor
