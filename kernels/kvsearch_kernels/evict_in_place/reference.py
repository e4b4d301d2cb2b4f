"""Meaning of `evict_in_place`."""

from collections.abc import Callable
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
        older: what slots have received in each of the R intervals before `[R, B, V, n + c]` fp32,
            the newest first, where these count as well; written.
        smooth: what ranks of slots in order of time `[B, V, n + c]` are replaced by; None: nothing.
    """

    seen: int
    first: int
    last: int
    recent: int = 0
    carry: float = 1.0
    forgets: bool = False
    divisors: Tensor | None = None
    softcap: float | None = None
    older: Tensor | None = None
    smooth: Callable[[Tensor], Tensor] | None = None


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
    own, may = torch.arange(c, device=slots.device), slice(how.first, how.last)
    later = own > own.repeat(G)[:, None]  # `[G * c, c]`
    votes = weights.to(wide).repeat(H // V * G).expand(B * V, 1, -1)
    rows = torch.arange(0, 2 * B * H * S, S, device=slots.device).view(2, B, H, 1)
    s = queries.new_empty(B * H, G * c, S, dtype=wide)
    out = torch.empty_like(queries, dtype=wide)
    for j in range(J):
        slots[..., n:, :], born[..., n:] = new[j], seen + own
        seen += c
        keys, values = slots.view(2, B * H, S, D).to(wide)
        torch.bmm(queries[j].to(wide), keys.mT, out=s)
        if how.softcap is not None:
            s.div_(how.softcap).tanh_().mul_(how.softcap)
        if c > 1:
            s[..., n:].masked_fill_(later, float("-inf"))
        p = torch.softmax(s, -1, out=s)
        torch.bmm(p if kind is None else p.to(kind).to(wide), values, out=out[j])
        received = (votes @ p.view(B * V, -1, S)).view_as(sums)
        if how.forgets:
            sums.copy_(received)
        else:
            sums.mul_(how.carry).add_(received)
        birth = born[..., may]
        rank = _ranks(sums, born, may, seen, how)
        # ranks are not negative, so their bits rise as they do
        key = torch.add(birth, rank.view(torch.int32), alpha=1 << 32)
        if how.recent:
            key.masked_fill_(birth >= seen - how.recent, LAST)
        gone = key.topk(c, largest=False, sorted=False).indices.sort(-1).values + how.first
        source, stays = own.expand_as(gone), kept[j]
        if c > 1 and how.last > n:
            source = _survivors(gone, n, c)
            stays = stays.gather(-2, source[None, ..., None].expand(2, B, H, c, D))
        born.scatter_(-1, gone, seen - c + source)
        slots.view(-1, D).index_copy_(0, (rows + gone).flatten(), stays.reshape(-1, D))
        if how.older is not None or not how.forgets:
            sums.scatter_(-1, gone, sums[..., n:].gather(-1, source))
        sums[..., n:] = 0
        if how.older is not None:
            how.older.scatter_(-1, gone.expand(len(how.older), *gone.shape), 0)
            how.older.copy_(torch.cat([sums[None], how.older[:-1]]))
    if J:
        slots[..., n:, :] = new[-1]  # also where one that goes was written
    return out.to(queries.dtype)


def _ranks(sums: Tensor, born: Tensor, may: slice, seen: int, how: Evictions) -> Tensor:
    """Ranks of the slots that `may` be evicted."""
    if how.older is not None:
        sums = torch.cat([sums[None], how.older]).sum(0)
    part = may if how.smooth is None else slice(None)
    rank = sums[..., part]
    if how.divisors is not None:
        rank = rank / how.divisors[seen - born[..., part]]
    if how.smooth is None:
        return rank
    order = born.argsort(-1)
    return torch.empty_like(rank).scatter_(-1, order, how.smooth(rank.gather(-1, order)))[..., may]


def _survivors(gone: Tensor, n: int, c: int) -> Tensor:
    """Which new token is written to each of the slots that are freed, in rising order `[B, V, c]`.

    As many of the old go as of the new stay, and these come first.
    """
    dropped = torch.zeros(*gone.shape[:-1], c + 1, dtype=torch.uint8, device=gone.device)
    dropped.scatter_(-1, (gone - n + 1).clamp_min(0), 1)
    return dropped[..., 1:].argsort(dim=-1, stable=True)
