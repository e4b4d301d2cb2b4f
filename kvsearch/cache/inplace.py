"""Eviction by score in a full cache, in place: new tokens take the places of the evicted.

The first `target` slots hold what was kept, in any order; the last `interval` slots hold the newest
tokens until their compaction. It drops as many tokens as are new, and survivors among the new are
written over the dropped: a few rows instead of the whole cache. Everything that the loop touches is
laid out before it, because at short intervals the number of small operations is what it costs.
"""

import torch
from torch import Tensor

from kvsearch.cache import one_by_one, turns
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
    out = _loop(slots, victims, wide(q, D), (k, v), quantised, weights, scale, softcap, state.impls)
    order = victims.leave()
    born = victims.born[..., :n].gather(-1, order)
    came = torch.where(
        born < state.seen, torch.searchsorted(before, born), born - state.seen + n
    )  # births rise with slots
    state.seen += M
    pools = pools_of_ages(layer, n, q.device)
    keys, values = (gather(x, order) for x in slots)
    store.hold(keys[..., :key_dim], values[..., :value_dim], pools, came, M)
    state.impls[scored_attention.name] = "inplace"
    out = out.view(-1, B, Hq, c, D).permute(1, 2, 0, 3, 4).reshape(B, Hq, M, D)
    return out[..., :value_dim]


def _loop(
    slots: Tensor,
    victims: Victims,
    q: Tensor,
    new: tuple[Tensor, Tensor],
    quantised: tuple[Tensor, Tensor] | None,
    weights: Tensor,
    scale: float,
    softcap: float | None,
    ran: Ran,
) -> Tensor:
    """Interval after interval: attend, vote, and write survivors over the dropped.

    Args:
        slots: keys and values `[2, B, H, n + c, D]`.
        victims: picks who goes.
        q: queries `[B, Hq, M, D]`.
        new: keys and values of the tokens.
        quantised: what their tier will read back, or None.
        weights: of the rows of an interval in the votes `[c]`.
        scale: factor on the dot products.
        softcap: bound of the products, if the model has one.
        ran: told if a kernel did it all in one launch.

    Returns:
        Attention output by interval `[J, B * H, Hq / H * c, D]`.
    """
    _, B, H, S, D = slots.shape
    Hq, M, c, V = q.shape[1], q.shape[2], victims.c, victims.sums.shape[2]
    n, J, G, voters = S - c, M // c, Hq // H, Hq // V
    queries, out = (q.new_empty(J, B * H, G * c, D) for _ in range(2))
    torch.mul(q.unflatten(2, (J, c)).movedim(2, 0), scale, out=queries.view(J, B, Hq, c, D))
    fresh_ones = intervals(torch.stack([wide(x, D) for x in new]), c)
    kept = fresh_ones
    if quantised is not None:
        kept = intervals(torch.stack([wide(x, D) for x in quantised]), c)
    if one_by_one.serves(victims, q):
        more = fresh_ones, kept, float(weights), softcap
        return one_by_one.run(slots, victims, queries, *more)
    how = victims.evictions(J, softcap)
    if how is not None:
        of = (slots, victims.sums[0], victims.born, queries, fresh_ones, kept, weights / G, how)
        impl = evict_in_place.pick(*of)
        if impl != "reference":  # what follows is faster than that
            ran[evict_in_place.name], victims.seen = impl, how.seen + M
            return evict_in_place.again(impl, *of)
    keys, values = slots.view(2, B * H, S, D)
    first = torch.arange(0, 2 * B * H * S, S, device=q.device).view(2, B, H, 1)
    own = torch.arange(c, device=q.device)
    votes = (
        (weights / voters)
        .to(torch.promote_types(q.dtype, torch.float32))
        .repeat(voters)
        .expand(B * V, 1, -1)
        .contiguous()
    )
    future = torch.zeros(c, c, dtype=q.dtype, device=q.device)
    future.masked_fill_(own > own.unsqueeze(-1), float("-inf"))
    s = q.new_empty(B * H, G * c, S)
    s_own, s_voters = s.view(B * H, G, c, S)[..., n:], s.view(B * V, voters * c, S)
    transposed, rows, newest = keys.transpose(1, 2), slots.view(-1, D), slots[..., n:, :]

    def turn(query: Tensor, fresh: Tensor, held: Tensor, result: Tensor) -> None:
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

    captured = turns.serves(out.device, J)
    if captured:  # then the tokens seen are counted where a replay counts them
        victims.seen = torch.full((), int(victims.seen), device=q.device)
    turns.repeat(turn, (queries, fresh_ones, kept), out, captured)
    return out


def wide(x: Tensor, width: int) -> Tensor:
    """`x` `[..., D]` with zeros up to `width` channels; they change no product."""
    more = width - x.shape[-1]
    return torch.nn.functional.pad(x, (0, more)) if more else x


def intervals(x: Tensor, c: int) -> Tensor:
    """`x` `[..., J * c, D]` as contiguous intervals `[J, ..., c, D]`."""
    return x.unflatten(-2, (-1, c)).movedim(-3, 0).contiguous()
