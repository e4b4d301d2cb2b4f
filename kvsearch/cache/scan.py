"""Token-by-token eviction by score, fast: the newest token takes the place of the evicted one.

With original positions the order of slots does not matter to attention, so nothing is moved: one
write per token instead of a gather of the whole cache. The decisions are those of the segments.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvsearch.cache.state import LayerState


def applies(state: "LayerState", m: int) -> bool:
    """Whether a call that brings `m` tokens to `state` can be scanned."""
    p, s, target = state.layer.policy, state.layer.policy.score, state.layer.target
    return (
        not state.packed
        and state.seen == 0
        and p.scored
        and s is not None
        and target is not None
        and m > target + 1
        and p.interval == 1
        and p.trigger == "stream"
        and p.ladder is None
        and p.positions == "original"
        and len(p.tiers) == 1
        and s.pool == 1
        and p.score_blocks == 1
        and p.fp16_sinks == 0
    )


def run(state: "LayerState", q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Replay a stream from its start: segments until the cache is full, then one write per token.

    Arguments are as in `LayerState.advance`, after rounding.
    """
    layer, p, s = state.layer, state.layer.policy, state.layer.policy.score
    target = layer.target
    assert target is not None and s is not None
    B, Hq, T, D = q.shape
    H = k.shape[1]
    out = torch.empty_like(q)
    head = slice(0, target)  # nothing is evicted yet
    out[:, :, head] = state._segments(q[:, :, head], k[:, :, head], v[:, :, head], scale, None)
    assert state.book is not None
    S, V = target + 1, state.book.sums.shape[2]
    sums = torch.zeros(B, V, S, dtype=state.book.sums.dtype)
    sums[..., :target] = state.book.sums[0]
    born = torch.arange(S).repeat(B, V, 1)
    keys, values = k.new_zeros(B, H, S, D), v.new_zeros(B, H, S, D)
    keys[:, :, :target], values[:, :, :target] = state.store.read()
    hole = torch.full((B, V, 1), target)
    queries = (q * scale).view(B, H, Hq // H, T, D)
    decay = 1 - 1 / s.horizon if s.horizon is not None and s.kind == "decay" else 1.0
    fresh = s.horizon == 1 and s.kind == "window"  # only the last row counts
    settled = state._settle_ahead(k, v)
    inf = torch.tensor(float("inf"), dtype=sums.dtype)
    weight = float(S) ** s.alpha
    for t in range(target, T):
        place = hole.expand(B, H, 1).unsqueeze(-1).expand(B, H, 1, D)
        keys.scatter_(2, place, k[:, :, t : t + 1])
        values.scatter_(2, place, v[:, :, t : t + 1])
        prob = torch.softmax(queries[:, :, :, t] @ keys.transpose(-1, -2), -1)
        out.view(B, H, Hq // H, T, D)[:, :, :, t] = prob @ values
        received = prob.mean(2) if V == H else prob.mean((1, 2)).unsqueeze(1)
        if fresh:
            sums = (received * weight).to(sums.dtype)
        else:
            sums.scatter_(2, hole, 0.0)
            if decay != 1.0:
                sums.mul_(decay)
            sums.add_(received, alpha=weight)
        born.scatter_(2, hole, t)
        if settled is not None:
            keys.scatter_(2, place, settled[0][:, :, t : t + 1])
            values.scatter_(2, place, settled[1][:, :, t : t + 1])
        state.book.sums, state.book.born = sums[None], born
        rank = state.book.ranks(t + 1, S)
        if p.recents:
            rank = torch.where(born > t - p.recents, inf, rank)
        if p.sinks:
            rank = torch.where(born < p.sinks, inf, rank)
        hole = rank.argmin(-1, keepdim=True)
    _leave(state, k, v, sums, born, hole)
    return out


def _leave(
    state: "LayerState", k: Tensor, v: Tensor, sums: Tensor, born: Tensor, hole: Tensor
) -> None:
    """Fill store and book with what is held, in order of time."""
    assert state.book is not None
    order = born.scatter(2, hole, -1).argsort(-1)[..., 1:]
    born = born.gather(-1, order)
    index = born.expand(k.shape[0], k.shape[1], -1).unsqueeze(-1).expand(-1, -1, -1, k.shape[3])
    n = born.shape[-1]
    state.store.load(k.gather(2, index), v.gather(2, index), torch.zeros(n, dtype=torch.uint8), 0)
    state.book.sums = sums.gather(-1, order)[None]
    state.book.born = born.to(torch.int32) if state.layer.policy.needs_age else None
    if state.book.score.horizon == 1 and state.book.score.kind == "window":
        state.book.sums = torch.zeros_like(state.book.sums)
    state.seen = k.shape[2]
