"""AdaKV's eviction with all heads of a layer at once, in place; the fast way of `adakv`.

As in `inplace`, new tokens take the places of the evicted. Heads hold unequal numbers of slots, so
each has places that are empty, which attention does not see: the places of all heads lie in one
tensor that is as wide as the head with the most slots.
"""

from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from kvsearch.cache import scan, sharing
from kvsearch.cache.compaction import pools_of_ages
from kvsearch.cache.dense import DenseStore
from kvsearch.cache.inplace import intervals, wide
from kvsearch.cache.later import Later
from kvsearch.cache.state import LayerState
from kvsearch.rules.attention import Attention, AttentionScorer
from kvsearch_kernels.choose_slots import rising_bits
from kvsearch_kernels.scored_attention import scored_attention

SPARE = 1.1  # places of a head beyond what it needs, so that few compactions make room


def applies(state: LayerState, m: int) -> bool:
    """Whether a call that brings `m` tokens to the heads, one of which is `state`, can be so run.

    New tokens must be recent ones, which no compaction drops at once, and ranks of slots must not
    depend on their neighbours.
    """
    p = state.layer.policy
    return (
        state.fast
        and scan.applies(state, m)
        and isinstance(p.rule, Attention)
        and p.rule.pool == 1
        and p.recent_window >= p.interval
    )


class Places:
    """Slots of all heads of a layer, in no order.

    Attributes:
        slots: keys and values `[2, H, S + c, D]` in the type in which attention is computed; the
            last `c` places are for the newest tokens.
        native: the type of what the heads hold.
        alive: places that hold a slot `[H, S]`.
        born: arrival index of each slot's token `[H, S + c]` int64.
        scorer: of all heads: its sums are `[R, 1, H, S + c]`.
        held: slots of each head.
        seen: tokens of the stream so far.
    """

    def __init__(self, states: Sequence[LayerState], kind: torch.dtype) -> None:
        first = states[0]
        assert isinstance(first.scorer, AttentionScorer) and first.layer.target is not None
        self.policy, self.target = first.layer.policy, first.layer.target
        self.c, self.seen = self.policy.interval, first.seen
        self.held = [state.store.n for state in states]
        self.scorer, self.aged = copy(first.scorer), first.scorer.born is not None
        rows = []
        for state in states:
            assert isinstance(state.store, DenseStore) and isinstance(state.scorer, AttentionScorer)
            # without ages, births only need to rise in time and be right for the recent window
            born = torch.arange(self.seen - state.store.n, self.seen, device=state.store.device)
            if state.scorer.born is not None:
                born = state.scorer.born[0, 0].long()
            k, v = state.store.release()
            rows.append((k[0, 0], v[0, 0], born, state.scorer.sums[:, 0, 0]))
        self.before = [born for _, _, born, _ in rows]
        self._heads = torch.arange(len(states), device=rows[0][0].device).unsqueeze(1)
        self.native = rows[0][0].dtype
        H, width = len(states), max(rows[0][0].shape[1], rows[0][1].shape[1])
        self.slots = rows[0][0].new_zeros(2, H, self.c, width, dtype=kind)
        self.alive = torch.zeros(H, 0, dtype=torch.bool, device=self.slots.device)
        self.born = torch.zeros(H, self.c, dtype=torch.int64, device=self.slots.device)
        self.sums = first.scorer.sums.new_zeros(len(first.scorer.sums), H, self.c)
        self.grow(max(self.held))
        for h, (k, v, born, sums) in enumerate(rows):
            n = len(k)
            self.slots[0, h, :n, : k.shape[1]], self.slots[1, h, :n, : v.shape[1]] = k, v
            self.alive[h, :n], self.born[h, :n], self.sums[:, h, :n] = True, born, sums
        self.hide()

    def grow(self, size: int) -> None:
        """Make room for heads of `size` slots."""
        S = self.alive.shape[1]
        more = int(SPARE * size) - S

        def wider(x: Tensor, axis: int) -> Tensor:  # empty places before the newest
            shape = list(x.shape)
            shape[axis] = more
            old, new = x.split([S, x.shape[axis] - S], axis)
            return torch.cat([old, x.new_zeros(shape), new], axis)

        self.slots, self.alive = wider(self.slots, 2), wider(self.alive, 1)
        self.born, self.sums = wider(self.born, 1), wider(self.sums, 2)
        self.scorer.sums = self.sums.unsqueeze(1)
        self.scorer.born = self.born.unsqueeze(0) if self.aged else None
        self.hidden = self.slots.new_zeros(len(self.born), 1, S + more + self.c)

    def hide(self) -> None:
        """Note which places attention must not see: `hidden` `[H, 1, S + c]` is added to it."""
        empty = ~self.alive
        self.hidden[:, 0, : -self.c].zero_().masked_fill_(empty, float("-inf"))

    def vote(self, probabilities: Tensor, own: Tensor, group: int) -> None:
        """Add what slots receive from an interval.

        Args:
            probabilities: of its rows `[H, group * c, S + c]`.
            own: 0 to `c - 1`.
            group: query heads of each KV head.
        """
        c, rule = self.c, self.scorer.rule
        weights = self.scorer.row_weights(torch.ones_like(own), c - 1 - own)
        if rule.alpha:
            held = self.alive.sum(1, keepdim=True)
            weights = weights * (held + 1 + own).float() ** rule.alpha
        kind = probabilities.dtype
        votes = (weights / group).to(kind).expand(len(self.held), c).repeat(1, group).unsqueeze(1)
        decays = rule.kind == "decay" and rule.horizon is not None
        carry = (1 - 1 / rule.horizon) ** c if decays and rule.horizon else 1.0
        self.sums[0].mul_(carry).add_((votes @ probabilities).squeeze(1))
        self.seen += c
        self.born[:, -c:] = own + (self.seen - c)

    def compact(self, kept: Tensor) -> None:
        """Share the slots anew, and write the newest tokens, as they are `kept` `[2, H, c, D]`."""
        p, c = self.policy, self.c
        fixed = p.sinks + p.recent_window
        first = p.sinks  # which have the first places
        born, alive = self.born[:, first:-c], self.alive[:, first:]
        ranks = self.scorer.corrected(self.seen)[0, :, first:-c]
        mine = alive & (born < self.seen - p.recent_window)
        # Ranks are at least 0, and so are their bits; births decide between equals, then heads. All
        # keys differ, so a threshold leaves exactly as many as there are above it.
        even, H = self.target - fixed, len(born)
        key = torch.add(born * H + self._heads, rising_bits(ranks), alpha=1 << 32)
        key.masked_fill_(~mine, -1)
        counts = Later((key >= _largest(key.view(-1), even * H)).sum(1)).tolist()
        got = sharing.shares(counts, even, [n + c - fixed for n in self.held], p.budgets.floor)
        least = torch.stack([_largest(row, n) for row, n in zip(key, got, strict=True)])
        alive.masked_fill_(mine & (key < least.unsqueeze(1)), False)
        self.held = [fixed + n for n in got]
        if max(self.held) > self.alive.shape[1]:
            self.grow(max(self.held))
        self._settle(kept)

    def _settle(self, kept: Tensor) -> None:
        """Write the newest tokens into empty places."""
        c, H, S = self.c, len(self.alive), self.alive.shape[1]
        places = (~self.alive).byte().topk(c, sorted=False).indices
        heads = torch.arange(0, 2 * H * (S + c), S + c, device=places.device).view(2, H, 1)
        rows = self.slots.view(-1, self.slots.shape[3])
        rows.index_copy_(0, (places + heads).view(-1), kept.reshape(-1, kept.shape[3]))
        self.born.scatter_(1, places, self.born[:, S:])
        self.alive.scatter_(1, places, True)
        new = self.sums[..., S:]
        self.sums.scatter_(2, places.expand(new.shape), new.clone())
        new.zero_()
        if self.scorer.forgets:  # the oldest partial sum leaves the window
            self.sums.copy_(self.sums.roll(1, 0))
            self.sums[0] = 0
        self.hide()

    def leave(self, states: Sequence[LayerState], came: int, dims: tuple[int, int]) -> None:
        """Give the heads back what they hold, in order of time; `came` tokens have come."""
        late = torch.iinfo(torch.int64).max
        births = self.born[:, : -self.c].masked_fill(~self.alive, late)
        for h, (state, n) in enumerate(zip(states, self.held, strict=True)):
            born, order = births[h].sort()
            born, order, old = born[:n], order[:n], self.before[h]
            start, scorer = self.seen - came, state.scorer
            assert isinstance(scorer, AttentionScorer)
            origin = torch.where(
                born < start, torch.searchsorted(old, born), born - start + len(old)
            )
            held = self.slots[:, h, order].to(self.native)
            k, v = (x[None, None, :, :d] for x, d in zip(held, dims, strict=True))
            pools = pools_of_ages(state.layer, n, k.device)
            state.store.hold(k, v, pools, origin[None, None], came)  # type: ignore[attr-defined]
            scorer.sums = self.sums[:, h, order][:, None, None]
            scorer.born = born.to(torch.int32)[None, None] if self.aged else None
            state.seen = self.seen
            state.impls[scored_attention.name] = "inplace"


def _largest(x: Tensor, n: int) -> Tensor:
    """The `n`-th largest number of `x` `[N]`; for none of them, what is above all."""
    if n == 0:
        return x.max() + 1
    return x.kthvalue(len(x) - n + 1).values


def run(
    states: Sequence[LayerState],
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    ready: Sequence[tuple[Tensor, Tensor] | None],
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Take in whole intervals of a layer whose heads hold all its slots, at a compaction.

    Args:
        states: of the heads.
        parts: of each head its queries `[1, G, M, D]`, keys `[1, 1, M, D]` and values
            `[1, 1, M, Dv]` in 16 bits.
        ready: of each head keys and values as their tier will read them back, or None where
            nothing is quantised.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[1, Hq, M, Dv]`.
    """
    kind = torch.promote_types(parts[0][0].dtype, torch.float32)  # as attention is computed
    q, k, v = (torch.cat([part[i][0] for part in parts]).to(kind) for i in range(3))
    c, G, dims = states[0].layer.policy.interval, len(q) // len(k), (k.shape[2], v.shape[2])
    width = max(dims)
    queries = intervals(wide(q * scale, width), c)
    queries = queries.unflatten(1, (-1, G)).flatten(2, 3)  # [J, H, G * c, D]
    fresh = intervals(torch.stack([wide(k, width), wide(v, width)]), c)
    kept, low = fresh, [x for x in ready if x is not None]
    if low:
        both = [torch.cat([x[i][0] for x in low]).to(kind) for i in range(2)]
        kept = intervals(torch.stack([wide(x, width) for x in both]), c)
    own = torch.arange(c, device=q.device)
    future = torch.zeros(c, c, dtype=q.dtype, device=q.device)
    future.masked_fill_(own > own.unsqueeze(-1), float("-inf"))
    places, out = Places(states, kind), torch.empty_like(queries)
    for query, new, held, result in zip(queries, fresh, kept, out, strict=True):
        keys, values = places.slots
        places.slots[:, :, -c:] = new
        if softcap is None:
            s = torch.baddbmm(places.hidden, query, keys.transpose(1, 2))
        else:
            s = torch.bmm(query, keys.transpose(1, 2)).div_(softcap).tanh_().mul_(softcap)
            s.add_(places.hidden)
        s.unflatten(1, (G, c))[..., -c:].add_(future)
        torch.softmax(s, -1, out=s)
        torch.bmm(s, values, out=result)
        places.vote(s, own, G)
        places.compact(held)
    places.leave(states, len(queries) * c, dims)
    return out.unflatten(2, (G, c)).movedim(0, 2).reshape(1, len(q), -1, width)[..., : dims[1]]
