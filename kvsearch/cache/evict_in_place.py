"""Eviction by sums of attention: fill the cache in large pieces, then evict in place.

With original positions the order of slots does not matter to attention, so a compaction need not
move what stays: survivors among the newest tokens take the places of the evicted, a few rows
instead of the whole cache. Decisions are those of the general loop (`segments`), which also takes
what is left over: up to the first compaction, the one compaction that evicts less than an interval,
and the tokens after the last one.

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

from kvsearch.cache.by_segment import segments
from kvsearch.cache.by_segment.compaction import pools_of_ages
from kvsearch.cache.head_group import Call, LayerState
from kvsearch.cache.slots.dense import DenseStore
from kvsearch.policy import LayerLayout
from kvsearch.rules.attention import AttentionScorer, divisors
from kvsearch.rules.pick import pick
from kvsearch_kernels.evict_in_place import Evictions, evict_in_place
from kvsearch_kernels.picking import gather
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 128  # queries of one attention map: small enough for the caches, large enough for a product


def serves(state: LayerState, m: int) -> bool:
    """Whether a call that brings `m` tokens to `state` can be scanned."""
    p = state.layer.policy
    return (
        not state.packed
        and state.rule is not None
        and "scan" in state.rule.fast
        and p.evicts
        and p.trigger != "prompt"
        and p.ladder is None
        and p.anchors is None
        and p.positions == "original"
        and p.quantised_on_arrival
        and m >= 2 * p.interval
    )


def run(state: LayerState, call: Call) -> Tensor:
    """Replay many tokens that have arrived, from whatever the state holds."""
    layer, c, total = state.layer, state.layer.policy.interval, call.count
    assert layer.target is not None
    out, done = call.room(), 0
    how: Callable[[LayerState, Call], Tensor]
    while done < total:
        held, whole = state.store.n, (total - done) // c
        room = (layer.target - held) // c
        at_compaction = state.store.residual == 0 and layer.clock.due(state.seen, state.prompt)
        if at_compaction and min(room, whole) > 0:
            step, how = min(room, whole) * c, while_filling
        elif at_compaction and held == layer.target and whole > 0:
            step, how = whole * c, in_full_cache
        else:
            due = layer.clock.after(state.seen, state.prompt)
            assert due is not None
            step, how = min(due - state.seen, total - done), segments.run
        part = slice(done, done + step)
        out[:, :, part] = how(state, call.tokens(part))
        done += step
    return out


def _quantised(state: LayerState, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """What the tier will read back of new tokens; None where nothing is quantised."""
    p, tier = state.layer.policy, state.codecs[0]
    if not p.quantizes:
        return None
    found = tier[0].read_back(k, state.impls), tier[1].read_back(v, state.impls)
    sinks = slice(0, max(0, p.fp16_sinks - state.seen))
    for low, native in zip(found, (k, v), strict=True):
        low[:, :, sinks] = native[:, :, sinks]
    return found


def while_filling(state: LayerState, call: Call) -> Tensor:
    """Take in whole intervals that fit, starting at a compaction.

    Args:
        state: holds `n` compacted tokens; with those of the call it must stay within its target.
        call: brings these, whose keys and values are in 16 bits.
    """
    q, k, v, softcap = call.q, call.k, call.v, call.softcap
    scorer, store, c = state.scorer, state.store, state.layer.policy.interval
    assert isinstance(scorer, AttentionScorer)
    B, Hq, M, D = q.shape
    H, V, n = k.shape[1], v.shape[3], store.n
    G = Hq // H
    kind, quantised = torch.promote_types(q.dtype, torch.float32), _quantised(state, k, v)
    ks, vs = quantised or (k, v)
    if n:
        ks, vs = (torch.cat([x, y], 2) for x, y in zip(store.read(), (ks, vs), strict=True))
    ks, vs = ks.to(kind), vs.to(kind)
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
        scorer.add((votes @ p.view(B, H, G * R, N)).squeeze(2), state.seen, R)
        state.seen += R
        if rolls:
            scorer.keep(None)
    store.append(k, v)
    layer = state.layer
    store.compact(None, pools_of_ages(layer, store.n, q.device))
    return out


def _diagonal(x: Tensor, c: int) -> Tensor:
    """The blocks `[..., R / c, c, c]` on the diagonal of `x` `[..., R, R]`, as a view."""
    R = x.shape[-1]
    blocks = x.unflatten(-1, (R // c, c)).unflatten(-3, (R // c, c))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def in_full_cache(state: LayerState, call: Call) -> Tensor:
    """Take in whole intervals, starting at a compaction that left exactly `target` tokens."""
    q, k, v = call.q, call.k, call.v
    scorer, store, layer = state.scorer, state.store, state.layer
    assert isinstance(scorer, AttentionScorer) and isinstance(store, DenseStore)
    B, Hq, M, _ = q.shape
    c, n, seen, V = layer.policy.interval, store.n, state.seen, scorer.sums.shape[2]
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
    how = replace(_evictions(layer, scorer, seen, seen + M, n), softcap=call.softcap, older=older)
    quantised = _quantised(state, k, v)
    for kind in {q.dtype: None, torch.promote_types(q.dtype, torch.float32): None}:
        fed = _fed(wide(q, D), (k, v), quantised, c, call.scale, kind)
        slots = slots.to(kind)
        impl = evict_in_place.pick(slots, sums, born, *fed, weights, how)
        if impl != "reference":
            break
    state.impls |= {evict_in_place.name: impl, scored_attention.name: "inplace"}
    out = evict_in_place.again(impl, slots, sums, born, *fed, weights, how)
    born, order = born[..., :n].sort(-1)
    if how.forgets:
        sums.zero_()
    sums = pick(parts, order[None])
    scorer.running.hold(sums, None if scorer.born is None else born.to(torch.int32))
    sources = torch.where(born < seen, torch.searchsorted(before, born), born - seen + n)
    state.seen += M
    pools = pools_of_ages(layer, n, q.device)
    keys, values = (gather(x, order).to(k.dtype) for x in slots)
    store.hold(keys[..., :key_dim], values[..., :value_dim], pools, sources, M)
    out = out.view(-1, B, Hq, c, D).permute(1, 2, 0, 3, 4).reshape(B, Hq, M, D)
    return out[..., :value_dim]


def _evictions(
    layer: LayerLayout, scorer: AttentionScorer, seen: int, last: int, n: int
) -> Evictions:
    """What `evict_in_place` is to do from `seen` to `last` tokens of the stream, in `n` slots.

    Candidates are slots behind the sinks, which are the first. New tokens are none of them if they
    are in the recent window.
    """
    p, rule = layer.policy, scorer.rule
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
