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

from torch import Tensor

from kvsearch.cache.by_segment import adakv, segments
from kvsearch.cache.head_group import Call, LayerState
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.rules.base import Segment
from kvsearch_kernels.decode_step import Heads, Stores, Sums, Turned, decode_step, given, prepare

REFUSED = object()  # no implementation takes this layer's formats, types or rule
_mine = threading.local()  # `recorded`: what a recording has met so far


@dataclass(frozen=True)
class Step:
    """A layer between two compactions.

    Attributes:
        stores: of its heads, as the op takes them.
        held: the store of each state, and which version of it this describes.
        due: the next compaction, in tokens seen.
        impl: of the op, for a token like the one it was picked for.
        like: what a token must be like.
    """

    stores: Stores
    held: Sequence[tuple[PackedStore, int]]
    due: int | None
    impl: str = ""
    like: object = None

    @property
    def outdated(self) -> bool:
        """Whether a store has changed but for tokens that came to its pool."""
        return any(store.version != version for store, version in self.held)

    def holds(self, states: Sequence[LayerState]) -> bool:
        """Whether this still describes `states`, and there is room for a token."""
        return not self.outdated and all(
            state.store is store and store.n < store.capacity
            for state, (store, _) in zip(states, self.held, strict=True)
        )


def advance(states: Sequence[LayerState], call: Call) -> Tensor | None:
    """Take in one token, see `ways.advance`; None if that is to be done store by store."""
    q, k, v = call.q, call.k, call.v
    first = states[0]
    step = first.step
    if step is REFUSED:
        return None
    anchored = first.sequences is not None
    if anchored and any(map(segments.isolated, states)):  # which no op serves; sums move
        first.step = None
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
    like = q.shape, q.dtype, q.requires_grad, call.softcap
    if step.like != like:
        impl = decode_step.pick(*asked, **call.how)
        if impl == "reference":
            first.step = REFUSED
            return None
        step = replace(step, impl=impl, like=like)
        first.impls[decode_step.name] = impl
    first.step = step
    if anchored:
        for state in states:
            segments.take_ahead(state, 1)
    out = decode_step.again(step.impl, *asked, **call.how)
    recorded: list[tuple[Sequence[LayerState], Call]] | None = getattr(_mine, "recorded", None)
    if recorded is None:
        taken(states, call)
    else:
        q, k, v = (x.new_empty(()).expand(x.shape) for x in (q, k, v))
        recorded.append((states, replace(call, q=q, k=k, v=v)))
    return out.unsqueeze(2)


def taken(states: Sequence[LayerState], call: Call) -> bool:
    """Count a token that the launches of a layer's step have taken in; compact if that is due.

    Args:
        states: of the layer's heads, which a `Step` describes.
        call: what brought it, or one like that.

    Returns:
        Whether slots have moved.
    """
    first, k, v = states[0], call.k, call.v
    step: Step = first.step
    for state, heads, (store, _) in zip(states, step.stores.heads, step.held, strict=True):
        store.added()
        if state.scorer is not None:
            if heads.sums is not None and state.scorer.running is not None:
                state.scorer.running.count += 1
            else:
                queries, foreseen = None, state.foreseen(1)
                if state.rule is not None and "queries" in state.rule.needs:
                    (queries,) = state.unturned(call.heads(state.layer.heads).q)
                state.scorer.observe(Segment(state.seen, 1, queries=queries, predicted=foreseen))
        state.seen += 1
    anchored = first.sequences is not None
    if anchored or first.seen == step.due:
        for state in states:
            state.note_peak()
        if anchored:
            segments.finish(states)
        elif _adaptive(first) and len(states) > 1:
            adakv.compact(states)
        else:
            segments.compact_states(states)
    if not step.outdated:
        return False
    first.step = None  # what a compaction replaced is freed
    first.step = _described(states, k, v)  # now, so that tokens in between are all alike
    if first.step is not None:
        prepare(first.impls[decode_step.name], call.q.squeeze(2), k, first.step.stores)
    return True


@contextmanager
def recording() -> Iterator[list[tuple[Sequence[LayerState], Call]]]:
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
    if first.rule is not None and "queries" in first.rule.needs:
        return None
    return given(first.impls.get(decode_step.name, ""), step.stores)


def forget(states: Sequence[LayerState]) -> None:
    """Let go of what a step is told of the layer, before several tokens replace what it holds."""
    for state in states:
        state.note_peak()
    if states[0].step is not REFUSED:
        states[0].step = None


def _adaptive(state: LayerState) -> bool:
    """Whether the heads of a layer share its slots anew at every compaction."""
    return state.layer.policy.budgets.kind == "adakv"


def _served(state: LayerState) -> bool:
    """Whether a token's slots can be stored, attended to and counted by one op."""
    plain = type(state.store) is PackedStore  # no other one, that wants to see what is appended
    return plain and state.packed and state.fast and state.seen > 0


def _described(states: Sequence[LayerState], k: Tensor, v: Tensor) -> Step | None:
    """The layer as it is before its next token `k`, `v` `[B, H, 1, D]`.

    None if a scorer does more than adding up what slots receive, or looking at queries.
    """
    first, found = states[0], list[Heads]()
    held = list[tuple[PackedStore, int]]()
    due = first.layer.clock.after(first.seen, first.prompt)
    for state in states:
        store, mine = state.store, slice(state.layer.heads.start, state.layer.heads.stop)
        assert isinstance(store, PackedStore)
        store.reserve(k[:, mine], v[:, mine])
        sums, needs = None, frozenset[str]() if state.rule is None else state.rule.needs
        if "rows" in needs:
            return None
        if "attention" in needs:
            running = None if state.scorer is None else state.scorer.running
            if running is None:
                return None
            sums = Sums(
                running.room(state.seen, store.capacity), store.order(store.capacity),
                held=store.n - store.used,
                end=0 if due is None else store.used + due - state.seen,
                alpha=running.alpha, horizon=running.horizon, keep=running.decay,
            )  # fmt: skip
        found.append(Heads(store.parts(), sums, _turned(state, store)))
        held.append((store, store.version))
    return Step(Stores(found, first.tables), held, due)


def _turned(state: LayerState, store: PackedStore) -> Turned | None:
    """How keys are turned where the policy re-indexes positions."""
    if not state.reindex:
        return None
    assert state.rotary is not None
    inv_freq, others = state.rotary.inv_freq.to(store.device), store.n - store.used
    return Turned(inv_freq, store.index(store.capacity), others, state.seen - store.n)
