"""Eviction by score in a full cache, in place: new tokens take the places of the evicted.

The first `target` slots hold what was kept, in any order; the last `interval` slots hold the newest
tokens until their tick. A tick picks as many victims as there are new tokens, and moves survivors
among the new into the places of victims among the old: a few rows instead of the whole cache.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsearch.cache.book import ScoreBook
from kvsearch.cache.compaction import assign_pools
from kvsearch.cache.dense import DenseStore
from kvsearch.cache.store import gather, gather_flat
from kvsearch.policy import LayerLayout
from kvsearch_kernels.scored_attention import scored_attention

if TYPE_CHECKING:
    from kvsearch.cache.state import LayerState

LAST = torch.iinfo(torch.int64).max


def run(
    state: "LayerState",
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settled: tuple[Tensor, Tensor] | None,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Take in whole intervals, starting at a tick that left exactly `target` tokens.

    Arguments are as in `filling.run`.
    """
    book, c, n = state.book, state.layer.policy.interval, state.store.n
    assert book is not None and isinstance(state.store, DenseStore)
    B, Hq, M, D = q.shape
    H, S, J = k.shape[1], n + c, M // c
    G, V = Hq // H, book.sums.shape[2]
    keys, values = (_room(x, c) for x in state.store.read())
    victims = _Victims(state.layer, book, state.seen, n)
    # interval by interval and contiguous, so that the loop slices without copies
    queries = _intervals(q * scale, c).reshape(J, B * H, G * c, D)
    out = torch.empty_like(queries)
    new_k, new_v = _intervals(k, c), _intervals(v, c)
    set_k, set_v = (_intervals(x, c) for x in settled) if settled else (new_k, new_v)
    k3, v3 = keys.view(B * H, S, D), values.view(B * H, S, D)
    own = torch.arange(c, device=q.device)
    future = torch.zeros(c, c, dtype=q.dtype, device=q.device)
    future.masked_fill_(own > own.unsqueeze(-1), float("-inf"))
    weights = book.row_weights(n + 1 + own, c - 1 - own) / (G * H // V)
    votes = weights.to(q.dtype).repeat(G * H // V).expand(B * V, 1, -1).contiguous()
    s = q.new_empty(B * H, G * c, S)
    for j in range(J):
        keys[:, :, n:], values[:, :, n:] = new_k[j], new_v[j]
        torch.bmm(queries[j], k3.transpose(1, 2), out=s)
        if softcap is not None:
            s.div_(softcap).tanh_().mul_(softcap)
        if c > 1:
            s.view(B * H, G, c, S)[..., n:] += future
        torch.softmax(s, -1, out=s)
        torch.bmm(s, v3, out=out[j])
        victims.vote(votes, s.view(B * V, -1, S))
        to, which = victims.tick()
        rows = (to + victims.first_row(H)).view(-1)
        k3.view(-1, D).index_copy_(0, rows, _rows(set_k[j], which))
        v3.view(-1, D).index_copy_(0, rows, _rows(set_v[j], which))
    state.seen += M
    order = victims.leave(state.seen)
    pools = assign_pools(state.layer, n, state.store.slot_pools(), None, q.device)
    state.store.hold(gather(keys, order), gather(values, order), pools)
    state.impls[scored_attention.name] = "inplace"
    return out.view(J, B, Hq, c, D).permute(1, 2, 0, 3, 4).reshape(B, Hq, M, D)


class _Victims:
    """Scores and births of slots in any order, and whom a tick drops.

    Attributes:
        sums: partial sums as in the book, `[R, B, V, S]`.
        born: arrival index of each slot's token `[B, V, S]` int64.
    """

    def __init__(self, layer: LayerLayout, book: ScoreBook, seen: int, n: int) -> None:
        self.layer, self.book, self.seen, self.n = layer, book, seen, n
        p, s = layer.policy, book.score
        self.c = p.interval
        R, B, V = book.sums.shape[:3]
        device = book.sums.device
        self.sums = torch.nn.functional.pad(book.sums, (0, self.c))
        # where nobody keeps ages, any births will do that rise with the slots and are right for
        # the newest
        old = torch.arange(seen - n, seen, device=device).expand(B, V, n)
        new = torch.arange(seen, seen + self.c, device=device).expand(B, V, self.c)
        self.born = torch.cat([old if book.born is None else book.born.long(), new], -1)
        decays = s.kind == "decay" and s.horizon is not None
        self.carry = (1 - 1 / s.horizon) ** self.c if decays and s.horizon else 1.0
        self.fresh = book.forgets and R == 1  # a tick forgets everything
        # a new token cannot be a victim, or is the only one: then new tokens keep their order
        self.direct = p.recents >= self.c or self.c == 1
        self._first_row: dict[int, Tensor] = {}
        self._sum = self.sums[0].view(B * V, 1, -1)
        book.sums = self.sums
        if book.born is not None:
            book.born = self.born

    def first_row(self, heads: int) -> Tensor:
        """Number of each head's first slot among the slots of all heads, `[B, H, 1]`."""
        if heads not in self._first_row:
            B, _, S = self.born.shape
            index = torch.arange(B * heads, device=self.born.device) * S
            self._first_row[heads] = index.view(B, heads, 1)
        return self._first_row[heads]

    def vote(self, votes: Tensor, probabilities: Tensor) -> None:
        """Add what slots receive: `votes` `[B * V, 1, rows]` times `[B * V, rows, S]`."""
        keep = 0.0 if self.fresh else self.carry
        if probabilities.dtype == self._sum.dtype:
            self._sum.baddbmm_(votes, probabilities, beta=keep)
        else:
            self._sum.mul_(keep).add_(votes @ probabilities)

    def tick(self) -> tuple[Tensor, Tensor | None]:
        """Pick as many victims as there are new tokens, and move the books of survivors.

        Returns:
            Slots to write `[B, V, c]`, and which new token goes into each (None: in order).
        """
        n, c = self.n, self.c
        self.seen += c
        to, which = self._pick(), None
        fresh = self.born[..., n:].clone()
        if not self.direct:
            to = to.sort(-1).values  # victims among the old first
            gone = torch.zeros(*to.shape[:-1], c + 1, dtype=torch.uint8, device=to.device)
            gone.scatter_(-1, (to - n + 1).clamp_min_(0), 1)
            which = gone[..., 1:].sort(dim=-1, stable=True).indices  # survivors first
            fresh = fresh.gather(-1, which)
        if self.fresh:
            pass
        else:
            new = self.sums[..., n:]
            index = to.expand(new.shape)
            new = new.clone() if which is None else new.gather(-1, which.expand(new.shape))
            self.sums.scatter_(-1, index, new)
            self.sums[..., n:] = 0
            if self.book.forgets:
                self.sums.copy_(self.sums.roll(1, 0))
                self.sums[0] = 0
        self.born.scatter_(-1, to, fresh)
        self.born[..., n:] = torch.arange(self.seen, self.seen + c, device=to.device)
        return to, which

    def _pick(self) -> Tensor:
        """Slots of the victims `[B, V, c]`: lowest score, and of equals the oldest."""
        p, book = self.layer.policy, self.book
        if book.score.pool > 1:
            order = self.born.argsort(-1)  # smoothing needs neighbours in time
            smooth = book.smooth(book.corrected(self.seen).gather(-1, order), self._old)
            rank = torch.empty_like(smooth).scatter_(-1, order, smooth)
        else:
            rank = book.corrected(self.seen)
        born = self.born[..., p.sinks :]
        # scores are not negative, so their bits rise as they do; births decide between equals
        key = rank[..., p.sinks :].view(torch.int32).long().mul_(1 << 32).add_(born)
        if p.recents:
            key.masked_fill_(born >= self.seen - p.recents, LAST)
        return key.topk(self.c, largest=False, sorted=False).indices.add_(p.sinks)

    @property
    def _old(self) -> int:
        """Slots before the recents, in order of time."""
        return self.n + self.c - self.layer.policy.recents

    def leave(self, seen: int) -> Tensor:
        """Put the book in order of time; returns that order `[B, V, n]`."""
        order = self.born[..., : self.n].argsort(-1)
        self.book.sums = gather_flat(self.sums, order[None])
        if self.fresh:
            self.book.sums = torch.zeros_like(self.book.sums)
        if self.book.born is not None:
            self.book.born = self.born.gather(-1, order).to(torch.int32)
        return order


def _room(x: Tensor, c: int) -> Tensor:
    """`x` `[B, H, N, D]` with room for `c` more slots."""
    return torch.nn.functional.pad(x, (0, 0, 0, c))


def _intervals(x: Tensor, c: int) -> Tensor:
    """`x` `[B, H, J * c, D]` as contiguous intervals `[J, B, H, c, D]`."""
    B, H, M, D = x.shape
    return x.reshape(B, H, M // c, c, D).permute(2, 0, 1, 3, 4).contiguous()


def _rows(x: Tensor, which: Tensor | None) -> Tensor:
    """Tokens `which` of an interval `[B, H, c, D]`, as rows `[B * H * c, D]`."""
    return (x if which is None else gather(x, which)).view(-1, x.shape[-1])
