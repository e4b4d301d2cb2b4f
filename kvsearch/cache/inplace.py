"""Eviction by score in a full cache, in place: new tokens take the places of the evicted.

The first `target` slots hold what was kept, in any order; the last `interval` slots hold the newest
tokens until their compaction. It drops as many tokens as are new, and survivors among the new are
written over the dropped: a few rows instead of the whole cache. Everything that the loop touches is
laid out before it, because at short intervals the number of small operations is what it costs.
Attention over 16 bits is computed in fp32, in which torch's operations want everything laid out.
"""

import torch
from torch import Tensor

from kvsearch.cache.compaction import pools_of_ages
from kvsearch.cache.dense import DenseStore
from kvsearch.cache.formats import Ran
from kvsearch.cache.state import LayerState
from kvsearch.cache.store import gather
from kvsearch.cache.victims import Victims
from kvsearch.rules.attention import AttentionScorer
from kvsearch_kernels.evict_in_place import evict_in_place
from kvsearch_kernels.scored_attention import scored_attention


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
    """Take in whole intervals, starting at a compaction that left exactly `target` tokens.

    Arguments are as in `filling.run`.
    """
    scorer, store, layer = state.scorer, state.store, state.layer
    assert isinstance(scorer, AttentionScorer) and isinstance(store, DenseStore)
    B, Hq, M, _ = q.shape
    c, n, H = layer.policy.interval, store.n, k.shape[1]
    key_dim, value_dim = k.shape[3], v.shape[3]
    D = max(key_dim, value_dim)  # keys and values lie in one tensor
    slots = k.new_zeros(2, B, H, n + c, D)
    for mine, x in zip(slots, store.release(), strict=True):
        mine[:, :, :n, : x.shape[3]] = x
    victims = Victims(layer, scorer, state.seen, n)
    before = victims.born[..., :n].clone()
    own = torch.arange(c, device=q.device)
    weights = scorer.row_weights(n + 1 + own, c - 1 - own)
    given = wide(q, D), (k, v), quantised, c, scale
    fed = _fed(*given, q.dtype)
    out = _fused(slots, victims, fed, weights, softcap, state.impls)
    kind = torch.promote_types(q.dtype, torch.float32)
    if out is None and kind is not q.dtype:
        slots, fed = slots.to(kind), _fed(*given, kind)
        out = _fused(slots, victims, fed, weights, softcap, state.impls)
    if out is None:
        out = _loop(slots, victims, fed, weights, softcap)
    order = victims.leave()
    born = victims.born[..., :n].gather(-1, order)
    came = torch.where(
        born < state.seen, torch.searchsorted(before, born), born - state.seen + n
    )  # births rise with slots
    state.seen += M
    pools = pools_of_ages(layer, n, q.device)
    keys, values = (gather(x, order).to(k.dtype) for x in slots)
    store.hold(keys[..., :key_dim], values[..., :value_dim], pools, came, M)
    state.impls[scored_attention.name] = "inplace"
    out = out.view(-1, B, Hq, c, D).permute(1, 2, 0, 3, 4).reshape(B, Hq, M, D)
    return out[..., :value_dim]


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


def _fused(
    slots: Tensor, victims: Victims, fed: tuple[Tensor, Tensor, Tensor], weights: Tensor,
    softcap: float | None, ran: Ran,
) -> Tensor | None:  # fmt: skip
    """`_loop` where an implementation of `evict_in_place` does it all, which `ran` is told.

    None where there is none.
    """
    J, heads, rows, _ = fed[0].shape
    how = victims.evictions(J, softcap)
    if how is None:
        return None
    _, B, V, _ = victims.sums.shape
    voters = rows // victims.c * (heads // (B * V))
    of = (slots, victims.sums[0], victims.born, *fed, weights / voters, how)
    impl = evict_in_place.pick(*of)
    if impl == "reference":  # what follows is faster than that
        return None
    ran[evict_in_place.name], victims.seen = impl, how.seen + J * victims.c
    return evict_in_place.again(impl, *of)


def _loop(
    slots: Tensor, victims: Victims, fed: tuple[Tensor, Tensor, Tensor], weights: Tensor,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Interval after interval: attend, vote, and write survivors over the dropped.

    Args:
        slots: keys and values `[2, B, H, n + c, D]`.
        victims: picks who goes.
        fed: see `_fed`; of the type of `slots`.
        weights: of the rows of an interval in the votes `[c]`.
        softcap: bound of the products, if the model has one.

    Returns:
        Attention output by interval `[J, B * H, Hq / H * c, D]`.
    """
    queries, fresh_ones, kept = fed
    _, B, H, S, D = slots.shape
    c, V = victims.c, victims.sums.shape[2]
    n, G = S - c, queries.shape[2] // c
    voters = H * G // V
    out = torch.empty_like(queries)
    keys, values = slots.view(2, B * H, S, D)
    first = torch.arange(0, 2 * B * H * S, S, device=slots.device).view(2, B, H, 1)
    own = torch.arange(c, device=slots.device)
    votes = (weights / voters).to(queries.dtype).repeat(voters).expand(B * V, 1, -1).contiguous()
    future = torch.zeros(c, c, dtype=queries.dtype, device=slots.device)
    future.masked_fill_(own > own.unsqueeze(-1), float("-inf"))
    s = queries.new_empty(B * H, G * c, S)
    s_own, s_voters = s.view(B * H, G, c, S)[..., n:], s.view(B * V, voters * c, S)
    transposed, rows, newest = keys.transpose(1, 2), slots.view(-1, D), slots[..., n:, :]

    for query, fresh, held, result in zip(queries, fresh_ones, kept, out, strict=True):
        newest.copy_(fresh)
        torch.bmm(query, transposed, out=s)
        if softcap is not None:
            s.div_(softcap).tanh_().mul_(softcap)
        if c > 1:
            s_own.add_(future)
        torch.softmax(s, -1, out=s)
        torch.bmm(s, values, out=result)
        victims.vote(votes, s_voters)
        places, which = victims.compact()
        if which is not None:
            index = which.expand(2, B, H, c).unsqueeze(-1)
            held = held.gather(-2, index.expand(2, B, H, c, D))
        rows.index_copy_(0, (places + first).view(-1), held.reshape(-1, D))
    return out


def wide(x: Tensor, width: int) -> Tensor:
    """`x` `[..., D]` with zeros up to `width` channels; they change no product."""
    more = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, more)) if more else x


def intervals(x: Tensor, c: int) -> Tensor:
    """`x` `[..., J * c, D]` as contiguous intervals `[J, ..., c, D]`."""
    return x.unflatten(-2, (-1, c)).movedim(-3, 0).contiguous()
