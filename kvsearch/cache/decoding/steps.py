"""One new token in all heads of a deployed layer with one op, where something implements that.

Between two compactions nothing about a layer changes but how many tokens its 16-bit pools hold. So
the layer is described once, and every token costs one call, whatever the number of its stores: on a
CPU a loop over them, on a GPU three to five launches.

These launches can be recorded, and repeated without the model's code (`cuda_graphs`): `launches`
tells whether they would be the same, and `taken` does what is left for the host.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.general import adakv, closing
from kvsearch.cache.general.segments import compact_states, finish
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.cache.state import LayerState
from kvsearch.rules.base import QuerySums, Segment
from kvsearch_kernels.decode_step import Heads, Stores, Sums, Turned, decode_step, given, prepare
from kvsearch_kernels.sum_queries import sum_queries

REFUSED = object()  # no implementation takes this layer's formats, types or rule
Token = tuple[Tensor, Tensor, Tensor]  # queries, keys and values, or what is like them
_mine = threading.local()  # `recorded`: what a recording has met so far


@dataclass(frozen=True)
class Asked:
    """Sums of queries, and what `sum_queries` is told to take their angle back, see there."""

    sums: QuerySums
    inv_freq: Tensor
    ahead: Tensor

    @property
    def given(self) -> Hashable:
        """What a launch is given of it, but for lengths."""
        held = (self.sums.total, self.sums.outer, self.inv_freq, self.ahead)
        return self.sums.skip, *(None if x is None else x.data_ptr() for x in held)


@dataclass(frozen=True)
class Step:
    """A layer between two compactions.

    Attributes:
        stores: of its heads, as the op takes them.
        held: the store of each state, and which edition of it this describes.
        asked: where each state sums queries, or None.
        due: the next compaction, in tokens seen.
        impl: of the op, for a token like the one it was picked for.
        like: what a token must be like.
        current: False once a token has come that this was not used for.
    """

    stores: Stores
    held: Sequence[tuple[PackedStore, int]]
    asked: Sequence[Asked | None]
    due: int | None
    impl: str = ""
    like: object = None
    current: bool = True

    def emptied(self) -> "Step":
        """What a later description goes on with; it holds nothing that a compaction replaces."""
        return replace(self, stores=Stores([], self.stores.kept), current=False)

    @property
    def outdated(self) -> bool:
        """Whether a store has changed but for tokens that came to its pool."""
        return any(store.edition != edition for store, edition in self.held)

    def holds(self, states: Sequence[LayerState]) -> bool:
        """Whether this still describes `states`, and there is room for a token."""
        if not self.current:
            return False
        for state, (store, edition) in zip(states, self.held, strict=True):
            pool = store.native_pool
            if state.store is not store or store.edition != edition or pool is None:
                return False
            if pool.used == pool.capacity:
                return False
        return True


def advance(
    states: Sequence[LayerState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor | None:
    """Take in one token, see `heads.advance`; None if that is to be done store by store."""
    first = states[0]
    step = first.step
    if step is REFUSED:
        return None
    anchored = first.sequences is not None
    if anchored and any(map(closing.blind, states)):  # which no op serves; sums move
        if step is not None:
            first.step = step.emptied()
        return None
    if step is None or not step.holds(states):
        if not all(map(_served, states)) or (_adaptive(first) and q.shape[0] > 1):
            return None  # `adakv` says why not
        step = _described(states, k, v)
        if step is None:
            first.step = REFUSED
            return None
    key, value = k, v
    if not q.is_cpu:  # whose loop rounds them
        key, value = k if first.reindex else k.to(first.native), v.to(first.native)
    asked = q.squeeze(2), key, value, step.stores
    more: Any = {"scale": scale, "softcap": softcap, "room": first.room}
    like = q.shape, q.dtype, q.requires_grad, softcap
    if step.like != like:
        impl = decode_step.pick(*asked, **more)
        if impl == "reference":
            first.step = REFUSED
            return None
        step = replace(step, impl=impl, like=like)
        first.impls[decode_step.name] = impl
    first.step = step
    if anchored:
        for state in states:
            closing.ahead(state, 1)
    if any(step.asked):
        _add_queries(states, step, asked[0])
    out = decode_step.again(step.impl, *asked, **more)
    recorded: list[tuple[Sequence[LayerState], Token]] | None = getattr(_mine, "recorded", None)
    if recorded is None:
        taken(states, (q, k, v))
    else:
        like_q, like_k, like_v = (x.new_empty(()).expand(x.shape) for x in (q, k, v))
        recorded.append((states, (like_q, like_k, like_v)))
    return out.unsqueeze(2)


def taken(states: Sequence[LayerState], token: Token) -> bool:
    """Count a token that the launches of a layer's step have taken in; compact if that is due.

    Args:
        states: of the layer's heads, which a `Step` describes.
        token: like its queries `[B, Hq, 1, D]`, keys and values `[B, H, 1, D]`.

    Returns:
        Whether slots have moved.
    """
    first, (q, k, v) = states[0], token
    step: Step = first.step
    held = zip(states, step.stores.heads, step.asked, step.held, strict=True)
    for state, heads, asked, (store, _) in held:
        if asked is not None and state.scorer is not None:
            state.scorer.asked(state.seen)
        store.counted()
        if heads.sums is not None and state.scorer is not None:
            state.scorer.counted(store.n)
        elif asked is None and state.scorer is not None:
            state.scorer.observe(Segment(state.seen, 1, predicted=state.foreseen(1)))
        state.seen += 1
    anchored = first.sequences is not None
    if anchored or first.seen == step.due:
        for state in states:
            state.note_peak()
        if anchored:
            finish(states)
        elif _adaptive(first) and len(states) > 1:
            adakv.compact(states)
        else:
            compact_states(states)
    if first.pending is None and not step.outdated:
        return False
    if first.pending is not None or not step.held[0][0].repeats(q.device):
        first.step = step.emptied()  # the next token describes the layer
    else:  # now, so that tokens in between are all alike
        first.step = _described(states, k, v)
        prepare(first.impls["decode_step"], q.squeeze(2), k, first.step.stores)
    return True


@contextmanager
def recording() -> Iterator[list[tuple[Sequence[LayerState], Token]]]:
    """Tokens only launch inside, and are not counted; gives the layers, and what is like a token.

    Where `launches` says that they cannot be repeated, a token must not come.
    """
    _mine.recorded = []
    try:
        yield _mine.recorded
    finally:
        del _mine.recorded


def launches(states: Sequence[LayerState]) -> Hashable:
    """All that the launches of a layer's next token are given, as a CUDA graph would fix it.

    None if something else than launches is to be done for it, or they have not been made before.
    """
    first = states[0]
    if first.seen and not first.store.n:
        return ()  # a layer without attention
    step = first.step
    if not isinstance(step, Step) or first.sequences is not None or not step.holds(states):
        return None
    if first.predictor is not None:
        return None  # scores of a token are made by the model's code
    found = given(first.impls.get(decode_step.name, ""), step.stores)
    if found is None:
        return None
    asked = (
        None if x is None else (x.given, heads.parts[-1].lengths.data_ptr())  # type: ignore[union-attr]
        for x, heads in zip(step.asked, step.stores.heads, strict=True)
    )
    return found, *asked


def forget(states: Sequence[LayerState]) -> None:
    """Let go of what a step is told of the layer, before several tokens replace what it holds."""
    for state in states:
        state.note_peak()
    if states[0].step is not REFUSED:
        states[0].step = None


def _add_queries(states: Sequence[LayerState], step: Step, q: Tensor) -> None:
    """Add the token's queries `q` `[B, Hq, D]` where rules sum them, before it is stored."""
    group = q.shape[1] // sum(len(state.layer.heads) for state in states)
    for state, heads, asked in zip(states, step.stores.heads, step.asked, strict=True):
        if asked is None:
            continue
        lengths, mine = heads.parts[-1].lengths, state.layer.heads
        assert state.scorer is not None and lengths is not None
        sum_queries.record(
            states[0].impls, q[:, mine.start * group : mine.stop * group], asked.sums.total,
            asked.sums.outer, asked.inv_freq, lengths, asked.ahead, skip=asked.sums.skip,
        )  # fmt: skip


def _adaptive(state: LayerState) -> bool:
    """Whether the heads of a layer share its slots anew at every compaction."""
    return state.layer.policy.budgets.kind == "adakv"


def _served(state: LayerState) -> bool:
    """Whether a token's slots can be stored, attended to and counted by one op."""
    plain = type(state.store) is PackedStore  # no other one, that wants to see what is appended
    return plain and state.packed and state.fast and state.seen > 0


def _described(states: Sequence[LayerState], k: Tensor, v: Tensor) -> Step | None:
    """The layer as it is before its next token `k`, `v` `[B, H, 1, D]`.

    None if a scorer does more than adding up what slots receive, or what queries are.
    """
    first, found, asked = states[0], list[Heads](), list[Asked | None]()
    held = list[tuple[PackedStore, int]]()
    due = first.layer.clock.after(first.seen, first.prompt)
    for state in states:
        store, mine = state.store, slice(state.layer.heads.start, state.layer.heads.stop)
        assert isinstance(store, PackedStore)
        pool = store.reserve(k[:, mine], v[:, mine])
        sums, needs = None, frozenset[str]() if state.rule is None else state.rule.needs
        asked.append(None)
        if "rows" in needs:
            return None
        if "queries" in needs:
            last = first.step.asked[len(found)] if isinstance(first.step, Step) else None
            asked[-1] = _asked(state, store.device, pool.used, last)
            if asked[-1] is None:
                return None
        if "attention" in needs:
            assert state.scorer is not None
            state.scorer.reserve(state.seen, store.capacity)
            ledger = state.scorer.ledger()
            if ledger is None:
                return None
            sums = Sums(
                ledger.sums, store.order(), held=store.n - pool.used,
                end=0 if due is None else pool.used + due - state.seen,
                alpha=ledger.alpha, horizon=ledger.horizon, keep=ledger.keep,
            )  # fmt: skip
        found.append(Heads(store.parts(), sums, _turned(state, store, pool.used)))
        held.append((store, store.edition))
    kept = first.step.stores.kept if isinstance(first.step, Step) else {}
    return Step(Stores(found, kept), held, asked, due)


def _asked(
    state: LayerState, device: torch.device, used: int, last: Asked | None
) -> Asked | None:  # fmt: skip
    """Where queries are summed; the pool holds `used`. None if that is not all a scorer does."""
    assert state.scorer is not None and state.rotary is not None
    sums, ahead = state.scorer.query_sums(), state.seen - used
    if sums is None:
        return None
    if last is None:
        place = torch.full((1,), ahead, dtype=torch.int32, device=device)
    else:
        place = last.ahead.fill_(ahead)  # where launches find it already
    return Asked(sums, state.rotary.inv_freq.to(device), place)


def _turned(state: LayerState, store: PackedStore, used: int) -> Turned | None:
    """How keys are turned where the policy re-indexes positions; the store's pool holds `used`."""
    if not state.reindex:
        return None
    assert state.rotary is not None
    inv_freq = state.rotary.inv_freq.to(store.device)
    return Turned(inv_freq, store.index(), store.n - used, state.seen - store.n)
