"""Candidates of eviction in a full cache whose slots are in no order: births and scores by slot."""

import torch
from torch import Tensor

from kvsearch.policy import LayerLayout
from kvsearch.rules.attention import AttentionScorer, divisors
from kvsearch.rules.pick import pick
from kvsearch_kernels.evict_in_place import Evictions

LAST = torch.iinfo(torch.int64).max


class Candidates:
    """Births and partial sums of `n` kept slots and `c` new ones, in place of a scorer's.

    Attributes:
        sums: as in the scorer `[R, B, V, n + c]`.
        born: arrival index of each slot's token `[B, V, n + c]` int64.
        seen: tokens of the stream so far.
    """

    def __init__(self, layer: LayerLayout, scorer: AttentionScorer, seen: int, n: int) -> None:
        p, s = layer.policy, scorer.rule
        self.policy, self.scorer, self.n, self.c = p, scorer, n, p.interval
        self.seen = seen
        R, B, V = scorer.sums.shape[:3]
        device = scorer.sums.device
        # without ages, births only need to rise in time and be right for the recent window
        old = torch.arange(seen - n, seen, device=device)
        if scorer.born is not None:
            old = scorer.born.long()
        self._new = torch.arange(seen, seen + self.c, device=device).expand(B, V, -1).clone()
        self.born = torch.cat([old.expand(B, V, n), self._new], -1)
        self.sums = torch.nn.functional.pad(scorer.sums, (0, self.c))
        self._sum = self.sums[0].view(B * V, 1, n + self.c)
        self._fresh = scorer.forgets and R == 1  # every compaction forgets all
        # Candidates are slots behind the sinks, which are the first. New tokens are none of them if
        # they are in the recent window; then, or if there is only one, they keep their order.
        safe = p.recent_window >= self.c
        self._direct = safe or self.c == 1
        self._mask = p.recent_window > (self.c if safe else 0)
        self._from, self._to = p.sinks, n if safe else n + self.c
        self._born = self.born[..., self._from : self._to]
        # the scorer then ranks the candidates alone; smoothing needs their neighbours too
        part = slice(None) if s.pool > 1 else slice(self._from, self._to)
        self._aged = scorer.born is not None
        scorer.running.hold(self.sums[..., part], self.born[..., part] if self._aged else None)
        self._born_tail, self._sums_tail = self.born[..., n:], self.sums[..., n:]

    @property
    def carry(self) -> float:
        """What is left of a sum after an interval."""
        return 0.0 if self._fresh else self.scorer.running.decay**self.c

    def evictions(self, intervals: int, softcap: float | None) -> Evictions | None:
        """What `evict_in_place` is to do in so many intervals; None if it does not serve.

        That is where scores are smoothed, or a window has several parts.
        """
        rule = self.scorer.rule
        if rule.pool > 1 or len(self.sums) > 1:
            return None
        last = self.seen + intervals * self.c
        by = divisors(rule, self.sums.device, last) if self._aged else None
        recent = self.policy.recent_window if self._mask else 0
        return Evictions(
            self.seen, self._from, self._to, recent, self.carry, self._fresh, by, softcap
        )

    def vote(self, votes: Tensor, probabilities: Tensor) -> None:
        """Add what slots receive: `votes` `[B * V, 1, rows]` times `[B * V, rows, n + c]`."""
        carry = self.carry
        if probabilities.dtype == self._sum.dtype:
            self._sum.baddbmm_(votes, probabilities, beta=carry)
        else:
            self._sum.mul_(carry).add_(
                votes.to(self._sum.dtype) @ probabilities.to(self._sum.dtype)
            )

    def compact(self) -> tuple[Tensor, Tensor | None]:
        """Pick as many evicted as there are new tokens, and note survivors among the new there.

        Returns:
            Slots to write `[B, V, c]`, and which new token goes into each (None: in order).
        """
        self.seen += self.c
        places, which, born = self._pick(), None, self._new
        if not self._direct:
            places, which = self._match(places)
            born = born.gather(-1, which)
        self.born.scatter_(-1, places, born)
        self._new.add_(self.c)
        if self._to > self.n or self.scorer.rule.pool > 1:
            self._born_tail.copy_(self._new)
        if not self._fresh:
            self._move_sums(places, which)
        return places, which

    def _pick(self) -> Tensor:
        """Slots of the evicted `[B, V, c]`: lowest score, and of equals the oldest."""
        rank = self.scorer.corrected(self.seen)
        if self.scorer.rule.pool > 1:
            order = self.born.argsort(-1)  # smoothing is over neighbours in time
            old = self.n + self.c - self.policy.recent_window
            smooth = self.scorer.smooth(rank.gather(-1, order), old)
            rank = torch.empty_like(smooth).scatter_(-1, order, smooth)
            rank = rank[..., self._from : self._to]
        # Scores are not negative, so their bits rise as they do; births decide between equals.
        key = torch.add(self._born, rank.view(torch.int32), alpha=1 << 32)
        if self._mask:
            key.masked_fill_(self._born >= self.seen - self.policy.recent_window, LAST)
        evicted = key.topk(self.c, largest=False, sorted=False).indices
        return evicted.add_(self._from) if self._from else evicted

    def _match(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Pair evicted among the old with survivors among the new; the rest stay where they are."""
        places = places.sort(-1).values  # the old first
        gone = torch.zeros(*places.shape[:-1], self.c + 1, dtype=torch.uint8, device=places.device)
        gone.scatter_(-1, (places - self.n + 1).clamp_min_(0), 1)
        return places, gone[..., 1:].sort(dim=-1, stable=True).indices  # survivors first

    def _move_sums(self, places: Tensor, which: Tensor | None) -> None:
        new = self._sums_tail
        new = new.clone() if which is None else new.gather(-1, which.expand(new.shape))
        self.sums.scatter_(-1, places.expand(new.shape), new)
        self._sums_tail.zero_()
        if self.scorer.forgets:
            self.sums.copy_(self.sums.roll(1, 0))
            self.sums[0] = 0

    def leave(self) -> Tensor:
        """Give the scorer its numbers back in order of time; returns that order `[B, V, n]`."""
        order = self.born[..., : self.n].argsort(-1)
        sums = pick(self.sums, order[None])
        born = self.born.gather(-1, order).to(torch.int32) if self._aged else None
        self.scorer.running.hold(torch.zeros_like(sums) if self._fresh else sums, born)
        return order
