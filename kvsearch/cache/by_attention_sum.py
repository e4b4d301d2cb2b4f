"""Eviction by sums of attention: fill the cache in large pieces, then evict in place.

With original positions the order of slots does not matter to attention, so a compaction need not
move what stays: survivors among the newest tokens take the places of the evicted, a few rows
instead of the whole cache. Decisions are those of `by_segment`, which also takes in what is left
over: up to the first compaction, the one compaction that evicts less than an interval, and the
tokens after the last one.

Until the cache is full a compaction does one thing: it quantises the interval's keys and values. So
a row sees quantised keys everywhere except in its own interval, where they are still in 16 bits;
those are a diagonal of small blocks, computed apart, and many intervals share one attention map.

In a full cache `evict_in_place` goes through all intervals: by a loop of numba on a CPU with
intervals of one token, in one Triton launch on a GPU, or interval by interval by torch, which
computes attention over 16 bits in fp32.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvsearch.cache.by_segment import dense_staging, segments
from kvsearch.cache.by_segment.eviction import pools_of_ages
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.dense import DenseStore
from kvsearch.policy import LayerLayout
from kvsearch.rules.attention import AttentionScorer, divisors
from kvsearch.rules.base import pick
from kvsearch_kernels.evict_in_place import Evictions, evict_in_place
from kvsearch_kernels.picking import gather
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 128  # queries of one attention map: small enough for the caches, large enough for a product
PIECE = 192  # tokens of a whole deployed layer that are taken in at once: copies beside the cache


def serves(layer: Layer, call: Call) -> bool:
    """Whether the tokens of a call can be taken in so in all heads."""
    p, whole = layer.policy, call.count >= 2 * layer.policy.interval
    if not (whole and p.evicts and p.ladder is None and p.anchors is None and not layer.adaptive):
        return False
    if p.trigger == "prompt" or p.positions != "original":
        return False
    return all(
        group.rule is not None
        and "scan" in group.rule.fast
        and group.layout.policy.quantised_on_arrival
        and (not group.packed or dense_staging.applies(layer, group, call))
        for group in layer.groups
    )


def run(layer: Layer, call: Call) -> Tensor:
    """Take in tokens group by group; of a deployed layer in pieces, as a dense one."""
    heads, least = call.k.shape[1], 2 * layer.policy.interval

    def taken(group: HeadGroup, mine: Call) -> Tensor:
        mine = group.arriving(mine)
        if not group.packed:
            return replay(layer, group, mine)
        size = max(PIECE * heads // len(group.heads), least)
        with dense_staging.staged(layer, group, mine):
            pieces = (mine.tokens(slice(i, i + size)) for i in range(0, mine.count, size))
            hows = ((x, replay if x.count >= least else _by_segment) for x in pieces)
            return torch.cat([how(layer, group, x) for x, how in hows], 2)

    out = layer.each(call, taken)
    layer.seen = call.end
    return out


def replay(layer: Layer, group: HeadGroup, call: Call) -> Tensor:
    """Take in many tokens that have arrived, from whatever the heads hold."""
    layout, c, total = group.layout, layer.policy.interval, call.count
    assert layout.target is not None
    out, done = call.room(), 0
    while done < total:
        held, whole, seen = group.store.n, (total - done) // c, call.seen + done
        room = (layout.target - held) // c
        at_compaction = group.store.residual == 0 and layer.compacts(seen)
        how: Callable[[HeadGroup, Call], Tensor]
        if at_compaction and min(room, whole) > 0:
            step, how = min(room, whole) * c, while_filling
        elif at_compaction and held == layout.target and whole > 0:
            step, how = whole * c, in_full_cache
        else:
            due = layer.next_compaction(seen)
            assert due is not None
            step, how = min(due - seen, total - done), partial(_by_segment, layer)
        part = slice(done, done + step)
        out[:, :, part] = how(group, call.tokens(part))
        done += step
    return out


def _by_segment(layer: Layer, group: HeadGroup, call: Call) -> Tensor:
    return segments.take_in(layer, [(group, call)])


def _quantised(group: HeadGroup, call: Call) -> tuple[Tensor, Tensor] | None:
    """What the tier will read back of new tokens; None where nothing is quantised."""
    p, (keys, values) = group.layout.policy, group.codecs[0]
    if not p.quantizes:
        return None
    found = keys.read_back(call.k, group.impls), values.read_back(call.v, group.impls)
    sinks = slice(0, max(0, p.fp16_sinks - call.seen))
    for low, native in zip(found, (call.k, call.v), strict=True):
        low[:, :, sinks] = native[:, :, sinks]
    return found


def while_filling(group: HeadGroup, call: Call) -> Tensor:
    """Take in whole intervals that fit, starting at a compaction.

    Args:
        group: holds `n` compacted tokens; with those of the call it must stay within its target.
        call: brings these, whose keys and values are in 16 bits.
    """
    q, k, v, softcap = call.q, call.k, call.v, call.softcap
    scorer, store, c = group.scorer, group.store, group.layout.policy.interval
    assert isinstance(scorer, AttentionScorer) and isinstance(store, DenseStore)
    B, Hq, M, D = q.shape
    H, V, n = k.shape[1], v.shape[3], store.n
    G = Hq // H
    kind, quantised = torch.promote_types(q.dtype, torch.float32), _quantised(group, call)
    new, old = quantised or (k, v), store.read() if n else None
    keys, values = (torch.cat(x, 2) for x in zip(*filter(None, (old, new)), strict=True))  # copies
    ks, vs = keys.to(kind), values.to(kind)
    out = q.new_empty(B, Hq, M, V)
    rolls = scorer.blocks > 1  # partial sums of several intervals are kept apart
    step = c if rolls else max(1, ROWS // c) * c
    for start in range(0, M, step):
        rows = slice(start, min(start + step, M))
        R, N = rows.stop - start, n + rows.stop
        part = (q[:, :, rows].to(kind) * call.scale).reshape(B * H, G * R, D)
        s = part @ ks[:, :, :N].reshape(B * H, N, D).transpose(-1, -2)
        own = s.view(B * H, G, R, N)[..., N - R :]
        if quantised is not None:
            residual = k[:, :, rows].to(kind).reshape(B * H, 1, R // c, c, D)
            _diagonal(own, c).copy_(part.view(B * H, G, R // c, c, D) @ residual.transpose(-1, -2))
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
            own = s.view(B * H, G, R, N)[..., N - R :]
        future = torch.ones(R, R, dtype=torch.bool, device=q.device).triu(1)
        own.masked_fill_(future, float("-inf"))
        p = torch.softmax(s, -1, out=s)
        o = p @ vs[:, :, :N].reshape(B * H, N, V)
        if quantised is not None:
            own = _diagonal(p.view(B * H, G, R, N)[..., N - R :], c)
            lost = v[:, :, rows] - vs[:, :, N - R : N]
            o += (own @ lost.reshape(B * H, 1, R // c, c, V)).view_as(o)
        out[:, :, rows] = o.view(B, Hq, R, V)
        left = torch.arange(R - 1, -1, -1, device=q.device)
        weights = scorer.row_weights(N - left, left % c)
        if scorer.forgets and not rolls:
            weights = torch.zeros_like(weights)  # a compaction forgets all before it
        votes = (weights / G).to(kind).repeat(G).expand(B, H, 1, G * R)
        scorer.add((votes @ p.view(B, H, G * R, N)).squeeze(2), call.seen + start, R)
        if rolls:
            scorer.keep(None)
    pools = pools_of_ages(group.layout, n + M, q.device)
    store.hold(keys, values, pools, torch.arange(n + M, device=q.device), M)
    return out


def _diagonal(x: Tensor, c: int) -> Tensor:
    """The blocks `[..., R / c, c, c]` on the diagonal of `x` `[..., R, R]`, as a view."""
    R = x.shape[-1]
    blocks = x.unflatten(-1, (R // c, c)).unflatten(-3, (R // c, c))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def in_full_cache(group: HeadGroup, call: Call) -> Tensor:
    """Take in whole intervals, starting at a compaction that left exactly `target` tokens."""
    q, k, v = call.q, call.k, call.v
    scorer, store, layout = group.scorer, group.store, group.layout
    assert isinstance(scorer, AttentionScorer) and isinstance(store, DenseStore)
    B, Hq, M, _ = q.shape
    c, n, seen, V = layout.policy.interval, store.n, call.seen, scorer.sums.shape[2]
    key_dim, value_dim = k.shape[3], v.shape[3]
    D = max(key_dim, value_dim)  # keys and values lie in one tensor
    slots = k.new_zeros(2, *k.shape[:2], n + c, D)
    for mine, x in zip(slots, store.release(), strict=True):
        mine[:, :, :n, : x.shape[3]] = x
    # without ages, births only need to rise in time and be right for the recent window
    before = torch.arange(seen - n, seen, device=q.device) if scorer.born is None else scorer.born
    before = before.long().expand(B, V, n).contiguous()
    parts, born = (torch.nn.functional.pad(x, (0, c)) for x in (scorer.sums, before))
    sums, older = parts[0], parts[1:] if len(parts) > 1 else None
    own = torch.arange(c, device=q.device)
    weights = scorer.row_weights(n + 1 + own, c - 1 - own) / (Hq // V)
    how = replace(_evictions(layout, scorer, seen, seen + M, n), softcap=call.softcap, older=older)
    quantised = _quantised(group, call)
    for kind in {q.dtype: None, torch.promote_types(q.dtype, torch.float32): None}:
        fed = _fed(wide(q, D), (k, v), quantised, c, call.scale, kind)
        slots = slots.to(kind)
        impl = evict_in_place.pick(slots, sums, born, *fed, weights, how)
        if impl != "reference":
            break
    group.impls |= {evict_in_place.name: impl, scored_attention.name: "inplace"}
    out = evict_in_place.again(impl, slots, sums, born, *fed, weights, how)
    born, order = born[..., :n].sort(-1)
    if how.forgets:
        sums.zero_()
    sums = pick(parts, order[None])
    scorer.running.hold(sums, None if scorer.born is None else born.to(torch.int32))
    sources = torch.where(born < seen, torch.searchsorted(before, born), born - seen + n)
    pools = pools_of_ages(layout, n, q.device)
    keys, values = (gather(x, order).to(k.dtype) for x in slots)
    store.hold(keys[..., :key_dim], values[..., :value_dim], pools, sources, M)
    out = out.view(-1, B, Hq, c, D).permute(1, 2, 0, 3, 4).reshape(B, Hq, M, D)
    return out[..., :value_dim]


def _evictions(
    layout: LayerLayout, scorer: AttentionScorer, seen: int, last: int, n: int
) -> Evictions:
    """What `evict_in_place` is to do from `seen` to `last` tokens of the stream, in `n` slots.

    Candidates are slots behind the sinks, which are the first. New tokens are none of them if they
    are in the recent window.
    """
    p, rule = layout.policy, scorer.rule
    c, recent, smooth = p.interval, p.recent_window, None
    if rule.pool > 1:
        smooth = partial(scorer.smooth, recent_from=n + c - recent)
    safe = recent >= c
    return Evictions(
        seen, p.sinks, n if safe else n + c,
        recent=recent if recent > (c if safe else 0) else 0,
        carry=0.0 if scorer.forgets else scorer.running.decay**c,
        forgets=scorer.forgets,  # every compaction forgets all
        divisors=None if scorer.born is None else divisors(rule, scorer.sums.device, last),
        smooth=smooth,
    )  # fmt: skip


def _fed(
    q: Tensor, new: tuple[Tensor, Tensor], quantised: tuple[Tensor, Tensor] | None, c: int,
    scale: float, kind: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A call's tokens by interval, in the type `kind`.

    Args:
        q: queries `[B, Hq, M, D]`.
        new: keys and values of the tokens.
        quantised: what their tier will read back, or None.
        c: tokens of an interval.
        scale: factor on the dot products.
        kind: type of what is returned.

    Returns:
        Scaled queries `[J, B * H, Hq / H * c, D]`, keys and values `[J, 2, B, H, c, D]`, and the
        same as their tier keeps them.
    """
    (B, Hq, M, D), H = q.shape, new[0].shape[1]
    J = M // c
    queries = q.new_empty(J, B * H, Hq // H * c, D, dtype=kind)
    torch.mul(
        q.unflatten(2, (J, c)).movedim(2, 0).to(kind), scale, out=queries.view(J, B, Hq, c, D)
    )
    fresh = intervals(torch.stack([wide(x, D) for x in new]).to(kind), c)
    if quantised is None:
        return queries, fresh, fresh
    return queries, fresh, intervals(torch.stack([wide(x, D) for x in quantised]).to(kind), c)


def wide(x: Tensor, width: int) -> Tensor:
    """`x` `[..., D]` with zeros up to `width` channels; they change no product."""
    more = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, more)) if more else x


def intervals(x: Tensor, c: int) -> Tensor:
    """`x` `[..., J * c, D]` as contiguous intervals `[J, ..., c, D]`."""
    return x.unflatten(-2, (-1, c)).movedim(-3, 0).contiguous()
