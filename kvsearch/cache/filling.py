"""Scored attention while nothing is evicted yet: many intervals at once.

Until the cache is full a compaction does one thing: it quantises the interval's keys and values.
So a row sees quantised keys everywhere except in its own interval, where they are still in 16 bits;
those are a diagonal of small blocks, computed apart. Attention over 16 bits is computed in fp32.
"""

import torch
from torch import Tensor

from kvsearch.cache.compaction import pools_of_ages
from kvsearch.cache.state import LayerState
from kvsearch.rules.attention import AttentionScorer

ROWS = 128  # queries of one attention map: small enough for the caches, large enough for a product


def run(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    quantised: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Take in whole intervals that fit, starting at a compaction.

    Args:
        state: holds `n` compacted tokens; with `q` it must stay within its target.
        q: queries `[B, Hq, M, D]`.
        k: keys `[B, H, M, D]` in 16 bits.
        v: values, likewise.
        quantised: what their tier will read back, or None where nothing is quantised.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.
    """
    scorer, store, c = state.scorer, state.store, state.layer.policy.interval
    assert isinstance(scorer, AttentionScorer)
    B, Hq, M, D = q.shape
    H, V, n = k.shape[1], v.shape[3], store.n
    G = Hq // H
    kind = torch.promote_types(q.dtype, torch.float32)
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
        part = (q[:, :, rows].to(kind) * scale).reshape(B * H, G * R, D)
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
    store.append(k, v, quantised)
    layer = state.layer
    store.compact(None, pools_of_ages(layer, store.n, q.device))
    return out


def _diagonal(x: Tensor, c: int) -> Tensor:
    """The blocks `[..., R / c, c, c]` on the diagonal of `x` `[..., R, R]`, as a view."""
    R = x.shape[-1]
    blocks = x.unflatten(-1, (R // c, c)).unflatten(-3, (R // c, c))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
