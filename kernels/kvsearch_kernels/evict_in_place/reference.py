"""Meaning of `evict_in_place`."""

from dataclasses import dataclass

import torch
from torch import Tensor

LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Evictions:
    """Which slots are evicted at the end of an interval.

    Attributes:
        seen: tokens of the stream before the first interval.
        first, last: slots that are candidates, the latter exclusive.
        recent: newest tokens that are not evicted although their slots are candidates.
        carry: what is left of a sum after an interval.
        forgets: whether sums start at nothing in every interval.
        divisors: what sums are divided by for a rank, by age (tokens since birth) `[A]` fp32; None:
            by nothing.
        softcap: bound of the products, if the model has one.
    """

    seen: int
    first: int
    last: int
    recent: int = 0
    carry: float = 1.0
    forgets: bool = False
    divisors: Tensor | None = None
    softcap: float | None = None


def reference(
    slots: Tensor,
    sums: Tensor,
    born: Tensor,
    queries: Tensor,
    new: Tensor,
    kept: Tensor,
    weights: Tensor,
    how: Evictions,
) -> Tensor:
    """Attend from J intervals of c tokens to n slots and the interval; each evicts c tokens.

    At the end of an interval every slot has received, from each query, its probability times the
    query's weight. The c candidates of lowest rank are evicted, of equals the oldest. New tokens
    that are not among them are written to the freed slots, both in rising order. `slots`, `sums`
    and `born` are written.

    Args:
        slots: keys and values `[2, B, H, n + c, D]`; the last c are of the interval before.
        sums: what slots have received `[B, V, n + c]` fp32, the last c nothing; V is H, or 1, and
            then all heads evict the same slots.
        born: arrival index of the tokens in the slots `[B, V, n + c]` int64.
        queries: scaled, `[J, B * H, G * c, D]`: of a KV head, query head by query head.
        new: keys and values of the tokens `[J, 2, B, H, c, D]`.
        kept: the same as their tier keeps them.
        weights: of the queries of an interval `[c]` fp32.
        how: see there.

    Returns:
        Outputs `[J, B * H, G * c, D]`, in the type of the queries.
    """
    return replayed(slots, sums, born, queries, new, kept, weights, how, None)


def replayed(
    slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor, kept: Tensor,
    weights: Tensor, how: Evictions, kind: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """`reference`; probabilities are rounded to `kind`, if one is given, before they weigh."""
    _, B, H, S, D = slots.shape
    J, c, V = len(queries), new.shape[-2], sums.shape[1]
    n, G, seen = S - c, queries.shape[2] // c, how.seen
    wide = torch.promote_types(queries.dtype, torch.float32)
    slot, own = (torch.arange(x, device=slots.device) for x in (S, c))
    later = own > own.repeat(G)[:, None]  # `[G * c, c]`
    votes = weights.to(wide).repeat(G)
    out = torch.empty_like(queries)
    for j in range(J):
        slots[..., n:, :] = new[j]
        keys, values = slots.view(2, B * H, S, D).to(wide)
        s = queries[j].to(wide) @ keys.mT
        if how.softcap is not None:
            s = how.softcap * torch.tanh(s / how.softcap)
        s[..., n:].masked_fill_(later, float("-inf"))
        p = s.softmax(-1)
        out[j] = ((p if kind is None else p.to(kind).to(wide)) @ values).to(out.dtype)
        received = (votes @ p).view(B, V, H // V, S).sum(2).to(sums.dtype)
        sums.copy_(received if how.forgets else sums * how.carry + received)
        born[..., n:] = seen + own
        seen += c
        rank = sums if how.divisors is None else sums / how.divisors[seen - born]
        may = (slot >= how.first) & (slot < how.last) & (born < seen - how.recent)
        key = ((rank.float().view(torch.int32).long() << 32) + born).masked_fill(~may, LAST)
        gone = torch.zeros_like(may).scatter(-1, key.argsort(-1)[..., :c], True)
        # as many of the old go as of the new stay, and these come first
        places = (~gone[..., :n]).byte().argsort(dim=-1, stable=True)[..., :c]
        which = gone[..., n:].byte().argsort(dim=-1, stable=True)[..., : places.shape[-1]]
        free = gone[..., :n].gather(-1, places)
        _put(born, places, born.gather(-1, n + which), free)
        if not how.forgets:
            _put(sums, places, sums.gather(-1, n + which), free)
        sums[..., n:] = 0
        rows_of = [x[None, ..., None].expand(2, -1, H, -1, D) for x in (places, which, free)]
        _put(slots, rows_of[0], kept[j].gather(-2, rows_of[1]), rows_of[2], -2)
    return out


def _put(x: Tensor, places: Tensor, values: Tensor, free: Tensor, axis: int = -1) -> None:
    """Write to those places of `x` that are free."""
    x.scatter_(axis, places, torch.where(free, values, x.gather(axis, places)))
