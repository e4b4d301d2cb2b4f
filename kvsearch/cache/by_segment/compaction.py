"""What one compaction drops, and the pool of every slot that stays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvsearch.cache.head_group import LayerState
from kvsearch.cache.slots.packed import Move, PackedStore, Store, compact_together
from kvsearch.policy import LayerLayout
from kvsearch.policy.schedule import Evictions, pools_by_age
from kvsearch.rules import Scorer
from kvsearch.rules.pick import pick
from kvsearch_kernels.choose_slots import Ask, Choice, Sums, choose_slots
from kvsearch_kernels.host_to_device import sent


@dataclass(frozen=True)
class Decision:
    """What a compaction does to one store.

    Attributes:
        store: whose slots are meant.
        keep: rising slots that stay, `[N']` or `[B, V, N']`; None: all, but for those that `ask`
            drops.
        pools: of those that stay; None: `ask` gives each its tier.
        ask: what is left to `choose_slots`; None where all is known.
    """

    store: Store
    keep: Tensor | None
    pools: Tensor | None
    ask: Ask | None = None


def decide(state: LayerState, scores: Tensor | None = None, target: int | None = None) -> Decision:
    """What the compaction of one layer, or of one kind of its heads, is to do.

    Args:
        state: of these; a ladder's cursor moves on.
        scores: ranks of the slots, if they are known already.
        target: slots to leave, instead of the layout's.
    """
    layer, store, scorer, n = state.layer, state.store, state.scorer, state.store.n
    held = None
    if scorer is not None and (layer.policy.tagged or layer.evictions.left(n) < n):
        running = scorer.running if layer.rungs is None else None
        held = None if running is None else running.moving(state.seen)
        if scores is None:
            scores = _scores(state, scorer, held)
        elif held is not None:
            held = replace(held, divisors=None)  # these are ranks
    target = layer.target if target is None else target
    gone = 0 if target is None else max(0, n - target)
    if scores is not None and layer.rungs is None:
        return _best(state, scores, gone, held)
    keep = None
    if gone and scores is None:
        keep, state.cursor = _by_age(layer.evictions, n, state.cursor, store.device)
    elif gone and scores is not None:
        keep, state.cursor = _ladders(layer.evictions, n, state.cursor, scores)
    return settled(state, keep, scores)


def _scores(state: LayerState, scorer: Scorer, held: Sums | None) -> Tensor:
    """Ranks of all slots, or sums that are ranks once they are divided by what is `held`."""
    if held is not None and held.divisors is not None:
        return held.sums
    scores, rule = scorer.ranks(state.slots()), state.rule
    if rule is not None and rule.share == "layer" and scores.shape[1] > 1:
        scores = scores.mean(1, keepdim=True)  # heads that vote together keep the same slots
    return scores


def _best(state: LayerState, scores: Tensor, gone: int, held: Sums | None) -> Decision:
    """Drop the `gone` slots of lowest score, and let the rest go into their pools."""
    layer, store, n = state.layer, state.store, state.store.n - gone
    counts = layer.tier_counts(n)
    tiered = layer.policy.tagged and len(counts) > 1
    if not tiered and gone == 0:
        return settled(state, None)
    old = store.slot_pools() if tiered else None
    pools = None if tiered else pools_of_ages(layer, n, store.device)
    ask = replace(_ask(layer, scores, old, gone, counts if tiered else ()), held=held)
    if isinstance(store, PackedStore) and not store.grouped:
        several = sum(count > 0 for count in store.counts(n)) > 1
        ask = replace(
            ask, room=store.room_after(n), places=store.order(store.n),
            after=pools if several else None, kinds=store.residual_pool + 1,
        )  # fmt: skip
    return Decision(store, None, pools, ask)


def settled(state: LayerState, keep: Tensor | None, scores: Tensor | None = None) -> Decision:
    """Drop all slots but `keep` (`[N']` or `[B, V, N']`), and let the rest go into their pools.

    Args:
        state: holds the slots.
        keep: rising slots, or None when all stay.
        scores: ranks of the slots before `[B, V, N]`, where pools follow from those.
    """
    layer, store = state.layer, state.store
    n = store.n if keep is None else keep.shape[-1]
    counts = layer.tier_counts(n)
    if scores is None or not layer.policy.tagged or len(counts) == 1:
        return Decision(store, keep, pools_of_ages(layer, n, store.device))
    old = store.slot_pools()
    if keep is not None:
        old, scores = pick(old, keep), pick(scores, keep)
    return Decision(store, keep, None, _ask(layer, scores, old, 0, counts))


def _ask(
    layer: LayerLayout, scores: Tensor, old: Tensor | None, gone: int, counts: Sequence[int]
) -> Ask:
    """What a layer's policy asks `choose_slots`."""
    p = layer.policy
    return Ask(
        scores, old, gone, sinks=p.sinks, recent=p.recent_window, counts=counts,
        fp16_sinks=p.fp16_sinks, fp16_recent=p.fp16_recent,
    )  # fmt: skip


def carry_out(decisions: Sequence[Decision]) -> list[tuple[Tensor | None, Choice | None]]:
    """Let all stores of a layer hold what was decided: each op is asked once for all of them.

    Returns:
        Of each store the slots that stayed, None where all did, and what else was chosen for them.
    """
    asks, ran = [d.ask for d in decisions if d.ask is not None], dict[str, str]()
    chosen = iter(choose_slots.record(ran, asks) if asks else ())
    found: list[tuple[Tensor | None, Choice | None]] = []
    together: list[Move] = []
    for d in decisions:
        store, keep, pools, choice = d.store, d.keep, d.pools, None
        if d.ask is not None:
            store.ran.update(ran)
            choice = next(chosen)
            keep = choice.keep if d.ask.gone else keep
            if pools is None and choice.pools is not None:
                pools = choice.pools[..., : choice.keep.shape[-1]]
        assert pools is not None
        found.append((keep, choice))
        if type(store) is PackedStore:
            together.append(Move(store, keep, pools, choice))
        else:
            store.compact(keep, pools)
    compact_together(together)
    return found


@lru_cache(maxsize=1024)
def _by_age(
    evictions: Evictions, n: int, cursor: int, device: torch.device
) -> tuple[Tensor | None, int]:
    """`Evictions.by_age` on a device; remembered, because layers and compactions repeat."""
    kept, cursor = evictions.by_age(n, cursor)
    return None if kept is None else sent(kept, device), cursor


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


def pools_of_ages(layer: LayerLayout, n: int, device: torch.device) -> Tensor:
    """Pool of each of the `n` slots left by a compaction `[N]` uint8: the newest are best off."""
    return _pools_by_age(layer.tier_counts(n), n, layer.policy.fp16_recent, device)


@lru_cache(maxsize=1024)
def _pools_by_age(
    counts: tuple[int, ...], n: int, fp16_recent: int, device: torch.device
) -> Tensor:
    return sent(pools_by_age(counts, n, fp16_recent), device)
