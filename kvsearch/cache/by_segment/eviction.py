"""What leaves a layer after its newest token, and the pool of every slot that stays.

Here slots are evicted, for every policy; `by_attention_sum` and `by_age` are faster for some.
`finish` asks whether an anchor closes its sequence or a compaction is due. Of each group of heads
that makes a `Decision`: by age (`Evictions`), by anchors (`Sequences`), or by rank, which
`choose_slots` turns into slots. `carry_out` lets the stores hold what was decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from kvsearch.cache.by_segment import adakv
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.refit import Whole, refit
from kvsearch.cache.slots.packed import Move, PackedStore, Store, compact_together
from kvsearch.policy import LayerLayout
from kvsearch.policy.schedule import Evictions, pools_by_age
from kvsearch.rules import Scorer
from kvsearch.rules.base import pick
from kvsearch_kernels.choose_slots import Ask, Choice, Sums, best_between, choose_slots
from kvsearch_kernels.host_to_device import sent


def finish(layer: Layer, seen: int, groups: Sequence[HeadGroup] | None = None) -> None:
    """After the newest token: drop what anchors leave behind, and compact if that is due.

    Args:
        layer: whose stores hold it.
        seen: tokens of the stream, it included.
        groups: those of the layer that have taken it in; None is all.
    """
    groups = layer.groups if groups is None else groups
    if layer.policy.anchors is not None:
        every = [(group, _closed(group, seen)) for group in groups]
        some = [(group, found) for group, found in every if found is not None]
        stayed = carry_out([found for _, found in some])
        for (group, _), (keep, _) in zip(some, stayed, strict=True):
            if group.scorer is not None and keep is not None:
                group.scorer.drop(keep)
        layer.note_peak(seen, [group for group, _ in some])
    if layer.compacts(seen) and not layer.rereads:
        compact([layer], seen, groups)


def compact(layers: Sequence[Layer], seen: int, groups: Sequence[HeadGroup] | None = None) -> None:
    """Compact a layer after `seen` tokens, or several whose heads share their slots.

    Args:
        layers: these.
        seen: tokens of the stream.
        groups: those of the layer that are compacted; None is all, of all layers.
    """
    shares = adakv.shares(layers, seen) if layers[0].adaptive else {}
    for layer in layers:
        mine = layer.groups if groups is None else groups
        decisions = [decide(group, seen, *shares.get(group, (None, None))) for group in mine]
        before = Whole.of(layer) if layer.policy.refits else None
        stayed = carry_out(decisions)
        if before is not None:
            refit(layer, before, [keep for keep, _ in stayed])
        for group, (keep, choice) in zip(mine, stayed, strict=True):
            if group.scorer is None:
                continue
            if choice is not None and choice.sums is not None and group.scorer.running is not None:
                group.scorer.running.hold(choice.sums, choice.born, group.store.n)
            else:
                group.scorer.keep(keep)
        layer.note_peak(seen, mine)


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


def decide(
    group: HeadGroup, seen: int, scores: Tensor | None = None, target: int | None = None
) -> Decision:
    """What a compaction of these heads after `seen` tokens is to do.

    Args:
        group: of these; a ladder's cursor moves on.
        seen: tokens of the stream.
        scores: ranks of the slots, if they are known already.
        target: slots to leave, instead of the layout's.
    """
    if group.sequences is not None:
        return _anchored(group, seen)
    layout, store, scorer, n = group.layout, group.store, group.scorer, group.store.n
    held = None
    if scorer is not None and (layout.policy.tagged or layout.evictions.left(n) < n):
        running = scorer.running if layout.rungs is None else None
        held = None if running is None else running.moving(seen)
        if scores is None:
            scores = _scores(group, scorer, seen, held)
        elif held is not None:
            held = replace(held, divisors=None)  # these are ranks
    target = layout.target if target is None else target
    gone = 0 if target is None else max(0, n - target)
    if scores is not None and layout.rungs is None:
        return _best(group, scores, gone, held)
    keep = None
    if gone and scores is None:
        keep, group.cursor = _by_age(layout.evictions, n, group.cursor, store.device)
    elif gone and scores is not None:
        keep, group.cursor = _ladders(layout.evictions, n, group.cursor, scores)
    return _settled(group, keep, scores)


def _scores(group: HeadGroup, scorer: Scorer, seen: int, held: Sums | None) -> Tensor:
    """Ranks of all slots, or sums that are ranks once they are divided by what is `held`."""
    if held is not None and held.divisors is not None:
        return held.sums
    scores, rule = group.ranks(seen), group.rule
    assert scores is not None
    if rule is not None and rule.share == "layer" and scores.shape[1] > 1:
        scores = scores.mean(1, keepdim=True)  # heads that vote together keep the same slots
    return scores


def _best(group: HeadGroup, scores: Tensor, gone: int, held: Sums | None) -> Decision:
    """Drop the `gone` slots of lowest score, and let the rest go into their pools."""
    layout, store, n = group.layout, group.store, group.store.n - gone
    counts = layout.tier_counts(n)
    tiered = layout.policy.tagged and len(counts) > 1
    if not tiered and gone == 0:
        return _settled(group, None)
    old = store.slot_pools() if tiered else None
    pools = None if tiered else pools_of_ages(layout, n, store.device)
    ask = replace(_ask(layout, scores, old, gone, counts if tiered else ()), held=held)
    if isinstance(store, PackedStore) and not store.grouped:
        several = sum(count > 0 for count in store.counts(n)) > 1
        ask = replace(
            ask, room=store.room_after(n), places=store.order(store.n),
            after=pools if several else None, kinds=store.residual_pool + 1,
        )  # fmt: skip
    return Decision(store, None, pools, ask)


def _settled(group: HeadGroup, keep: Tensor | None, scores: Tensor | None = None) -> Decision:
    """Drop all slots but `keep` (`[N']` or `[B, V, N']`), and let the rest go into their pools.

    Args:
        group: holds the slots.
        keep: rising slots, or None when all stay.
        scores: ranks of the slots before `[B, V, N]`, where pools follow from those.
    """
    layout, store = group.layout, group.store
    n = store.n if keep is None else keep.shape[-1]
    counts = layout.tier_counts(n)
    if scores is None or not layout.policy.tagged or len(counts) == 1:
        return Decision(store, keep, pools_of_ages(layout, n, store.device))
    old = store.slot_pools()
    if keep is not None:
        old, scores = pick(old, keep), pick(scores, keep)
    return Decision(store, keep, None, _ask(layout, scores, old, 0, counts))


def _closed(group: HeadGroup, seen: int) -> Decision | None:
    """Drop what the newest token leaves behind; None if it leaves nothing."""
    assert group.sequences is not None
    stays = group.sequences.kept_at_end()
    if stays is None:
        return None
    scores = group.ranks(seen) if group.layout.policy.tagged else None
    group.sequences.keep(stays)
    return _settled(group, sent(stays, group.store.device), scores)


def _anchored(group: HeadGroup, seen: int) -> Decision:
    """Ordinary tokens go first, then the oldest anchors."""
    sequences, target, n = group.sequences, group.layout.target, group.store.n
    assert sequences is not None
    over = target is not None and n > target
    scores = group.ranks(seen) if over or group.layout.policy.tagged else None
    keep = None
    if over and target is not None:
        found = sequences.eviction(target)
        keep = sent(found.stays, group.store.device)
        if scores is not None and n - target < found.last - found.first:
            keep = best_between(scores, found.first, found.last, n - target)
        sequences.keep(found.stays)
    return _settled(group, keep, scores)


def _ask(
    layout: LayerLayout, scores: Tensor, old: Tensor | None, gone: int, counts: Sequence[int]
) -> Ask:
    """What the policy of some heads asks `choose_slots`."""
    p = layout.policy
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


def pools_of_ages(layout: LayerLayout, n: int, device: torch.device) -> Tensor:
    """Pool of each of the `n` slots left by a compaction `[N]` uint8: the newest are best off."""
    return _pools_by_age(layout.tier_counts(n), n, layout.policy.fp16_recent, device)


@lru_cache(maxsize=1024)
def _pools_by_age(
    counts: tuple[int, ...], n: int, fp16_recent: int, device: torch.device
) -> Tensor:
    return sent(pools_by_age(counts, n, fp16_recent), device)
