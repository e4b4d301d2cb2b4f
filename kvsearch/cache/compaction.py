"""What one compaction drops, and the pool of every slot that stays."""

from functools import lru_cache

import torch
from torch import Tensor

from kvsearch.cache.store import Store
from kvsearch.policy import LayerLayout
from kvsearch.policy.schedule import Evictions, pools_by_age
from kvsearch.rules import Scorer, Slots
from kvsearch.rules.pick import pick
from kvsearch_kernels.choose_slots import best_between, choose_slots


def compact(
    layer: LayerLayout,
    store: Store,
    scorer: Scorer | None,
    slots: Slots,
    cursor: int,
    scores: Tensor | None = None,
    target: int | None = None,
) -> int:
    """Compact one layer.

    Args:
        layer: integers of the layer.
        store: what it holds.
        scorer: what its rule knows, if it has one.
        slots: what the scorer may look at.
        cursor: first slot that the ladder's present pass has not thinned.
        scores: ranks of the slots, if they are known already.
        target: slots to leave, instead of the layout's.

    Returns:
        The new cursor.
    """
    decides = layer.policy.tagged or layer.evictions.left(store.n) < store.n
    if scorer is not None and decides and scores is None:
        scores = scorer.ranks(slots)
        rule = layer.policy.active_rule
        if rule is not None and rule.share == "layer" and scores.shape[1] > 1:
            scores = scores.mean(1, keepdim=True)  # heads that vote together keep the same slots
    target = layer.target if target is None else target
    if scores is None or layer.rungs is not None:
        keep, cursor = survivors(layer, store.n, cursor, scores, store.device, target)
        settle(layer, store, keep, scores)
    else:
        keep = _best(layer, store, scores, 0 if target is None else max(0, store.n - target))
    if scorer is not None:
        scorer.keep(keep)
    return cursor


def _best(layer: LayerLayout, store: Store, scores: Tensor, gone: int) -> Tensor | None:
    """Drop the `gone` slots of lowest score and move the rest into their pools; who stays."""
    p, n = layer.policy, store.n - gone
    counts = layer.tier_counts(n)
    tiered = p.tagged and len(counts) > 1
    if not tiered and gone == 0:
        settle(layer, store, None)
        return None
    keep, pools = choose_slots.record(
        store.ran, scores, store.slot_pools(), gone=gone, sinks=p.sinks, recent=p.recent_window,
        counts=counts if tiered else (), fp16_sinks=p.fp16_sinks, fp16_recent=p.fp16_recent,
    )  # fmt: skip
    if pools is None:
        pools = _pools_by_age(counts, n, p.fp16_recent, store.device)
    stay = keep if gone else None
    store.compact(stay, pools)
    return stay


def settle(
    layer: LayerLayout, store: Store, keep: Tensor | None, scores: Tensor | None = None
) -> None:
    """Drop all slots but `keep` (`[N']` or `[B, V, N']`), and move the rest into their pools.

    Args:
        layer: integers of the layer.
        store: what it holds.
        keep: rising slots, or None when all stay.
        scores: ranks of the slots before `[B, V, N]`, where pools follow from those.
    """
    old = store.slot_pools()
    if keep is not None:
        old = pick(old, keep)
        scores = None if scores is None else pick(scores, keep)
    n = store.n if keep is None else keep.shape[-1]
    ranked = scores if layer.policy.tagged else None
    store.compact(keep, assign_pools(layer, n, old, ranked, store.device))


def survivors(
    layer: LayerLayout,
    n: int,
    cursor: int,
    scores: Tensor | None,
    device: torch.device,
    target: int | None,
) -> tuple[Tensor | None, int]:
    """Slots that survive a compaction.

    Args:
        layer: integers of the layer.
        n: tokens held.
        cursor: first slot that the ladder's present pass has not thinned.
        scores: `[B, V, N]`, higher is better, or None to go by age.
        device: where the index is needed.
        target: slots to leave; None keeps all.

    Returns:
        Rising slot indices, `[N']` or `[B, V, N']`, or None when all stay; and the new cursor.
    """
    if target is None or n <= target:
        return None, cursor
    if scores is None:
        return _by_age(layer.evictions, n, cursor, device)
    if layer.rungs is not None:
        return _ladders(layer.evictions, n, cursor, scores)
    p = layer.policy
    return best_between(scores, p.sinks, n - p.recent_window, n - target), cursor


@lru_cache(maxsize=1024)
def _by_age(
    evictions: Evictions, n: int, cursor: int, device: torch.device
) -> tuple[Tensor | None, int]:
    """`Evictions.by_age` on a device; remembered, because layers and compactions repeat."""
    kept, cursor = evictions.by_age(n, cursor)
    return None if kept is None else torch.from_numpy(kept).to(device), cursor


def _ladders(evictions: Evictions, n: int, cursor: int, scores: Tensor) -> tuple[Tensor, int]:
    """Lay ladders, of which each keeps its best-ranked slots instead of its layer's rungs."""
    r = evictions.rungs
    assert r is not None
    index = torch.arange(n, device=scores.device).expand(*scores.shape[:-1], -1)
    blocks, cursor = evictions.blocks(n, cursor)
    while blocks:
        # ladders of one pass follow each other without a gap, and are laid together
        many = next((i for i, b in enumerate(blocks) if i and b.fresh), len(blocks))
        start, end = blocks[0].start, blocks[0].start + many * r.B
        laid = index[..., start:end].unflatten(-1, (many, r.B))
        ranks = scores.gather(-1, index[..., start:end]).unflatten(-1, (many, r.B))
        best = ranks.sort(dim=-1, stable=True).indices[..., r.R :]
        kept = laid.gather(-1, best.sort(-1).values).flatten(-2)
        index = torch.cat([index[..., :start], kept, index[..., end:]], -1)
        blocks = blocks[many:]
    return index, cursor


def assign_pools(
    layer: LayerLayout, n: int, old: Tensor, scores: Tensor | None, device: torch.device
) -> Tensor:
    """Pool of each of the `n` slots left by a compaction, `[N]` or `[B, V, N]` uint8.

    Without scores the newest tokens are in the best tier. With scores, sinks and the recent window
    come first, then the best scores; a tier prefers tokens that were never stored in a worse one,
    since what was rounded away does not come back.

    Args:
        layer: integers of the layer.
        n: tokens left.
        old: pools before the compaction, same slots; residual tokens count as the best tier.
        scores: `[B, V, N]` of the same slots, or None.
        device: where the result is needed.
    """
    p = layer.policy
    counts = layer.tier_counts(n)
    if scores is None or len(counts) == 1:
        return _pools_by_age(counts, n, p.fp16_recent, device)
    _, pools = choose_slots(
        scores, old, gone=0, sinks=p.sinks, recent=p.recent_window, counts=counts,
        fp16_sinks=p.fp16_sinks, fp16_recent=p.fp16_recent,
    )  # fmt: skip
    assert pools is not None
    return pools


@lru_cache(maxsize=1024)
def _pools_by_age(
    counts: tuple[int, ...], n: int, fp16_recent: int, device: torch.device
) -> Tensor:
    return torch.from_numpy(pools_by_age(counts, n, fp16_recent)).to(device)
