"""One new token in all heads of a deployed layer with one op, where something implements that.

Between two compactions nothing about a layer changes but how many tokens its 16-bit pools hold. So
the layer is described once, and every token costs one call, whatever the number of its stores: on a
CPU a loop over them, on a GPU three to five launches.

These launches can be recorded, and repeated without the model's code (`cuda.graphs`): `launches`
tells whether they would be the same, and `taken` does what is left for the host.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from kvsearch.cache import entering
from kvsearch.cache.by_segment import eviction
from kvsearch.cache.call import Call
from kvsearch.cache.entering import OpenTier
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.rules.base import Segment
from kvsearch_kernels.decode_step import Heads, Stores, Sums, Turned, decode_step, given, prepare
from kvsearch_kernels.decode_step.numba_impl import joined

REFUSED = object()  # no implementation takes this layer's formats, types or rule
_mine = threading.local()  # `recorded`: what a recording has met so far


@dataclass(frozen=True)
class Step:
    """A layer between two compactions.

    Attributes:
        stores: of its heads, as the op takes them.
        held: the store of each group, and which version of it this describes.
        due: the next compaction, in tokens seen.
        tiers: those that tokens enter at once, of each group; none where they wait for `due`.
        impl: of the op, for a token like the one it was picked for.
        like: what a token must be like.
    """

    stores: Stores
    held: Sequence[tuple[PackedStore, int]]
    due: int | None
    tiers: Sequence[OpenTier] = ()
    impl: str = ""
    like: object = None

    @property
    def outdated(self) -> bool:
        """Whether a store has changed but for tokens that came to its pool."""
        return any(store.version != version for store, version in self.held)

    def holds(self, groups: Sequence[HeadGroup]) -> bool:
        """Whether this still describes `groups`, and there is room for a token."""
        return not self.outdated and all(
            group.store is store and store.n < store.capacity
            for group, (store, _) in zip(groups, self.held, strict=True)
        )


def serves(layer: Layer, call: Call) -> bool:
    """Whether one op takes in the one token of a call; `layer.step` then tells it how."""
    step = layer.step
    if call.count > 1 or step is REFUSED:
        return False
    if layer.policy.anchors is not None and layer.hides():  # which no op serves; sums move
        layer.step = None
        return False
    if step is None or not step.holds(layer.groups):
        if not call.seen or not all(map(_served, layer.groups)):
            return False
        step = _described(layer, call.k, call.v)
        if step is None:
            layer.step = REFUSED
            return False
    like = call.q.shape, call.q.dtype, call.q.requires_grad, call.softcap
    if step.like != like:
        impl = decode_step.pick(*_asked(layer, call, step), **call.how)
        if impl == "reference":
            layer.step = REFUSED
            return False
        step = replace(step, impl=impl, like=like)
        layer.impls[decode_step.name] = impl
    layer.step = step
    return True


def run(layer: Layer, call: Call) -> Tensor:
    """Take in one token in all heads."""
    if layer.policy.anchors is not None:
        layer.take_ahead(call.seen, 1)
    out = decode_step.again(layer.step.impl, *_asked(layer, call, layer.step), **call.how)
    recorded: list[tuple[Layer, Call]] | None = getattr(_mine, "recorded", None)
    if recorded is None:
        taken(layer, call)
    else:
        q, k, v = (x.new_empty(()).expand(x.shape) for x in (call.q, call.k, call.v))
        recorded.append((layer, replace(call, q=q, k=k, v=v)))
    return out.unsqueeze(2)


def run_together(layers: Sequence[Layer], call: Call, memo: dict[str, Any]) -> Tensor | None:
    """Take in a token each in all heads of several sequences' layers, with one call of the op.

    Args:
        layers: of the same layer of the model, all served.
        call: their tokens `[R, H, 1, D]`, a row each.
        memo: what is kept from one token to the next.

    Returns:
        Outputs `[R, Hq, 1, Dv]`; None where their op takes one sequence's stores at a time.
    """
    if {layer.step.impl for layer in layers} != {"numba"}:
        return None
    q, k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (call.q, call.k, call.v))
    stores = joined([layer.step.stores for layer in layers], memo.get("stores"))
    out = decode_step.again("numba", q.squeeze(2), k, v, stores, **call.how)
    memo["stores"] = stores
    for i, layer in enumerate(layers):
        taken(layer, call.row(i, layer.seen))
    return out.view(len(layers), -1, 1, out.shape[-1])


def _asked(layer: Layer, call: Call, step: Step) -> tuple[Tensor, Tensor, Tensor, Stores]:
    """What the op is given of a token."""
    k, v = call.k, call.v
    if not call.q.is_cpu:  # whose loop rounds them
        k, v = k if layer.reindex else k.to(layer.native), v.to(layer.native)
    return call.q.squeeze(2), k, v, step.stores


def taken(layer: Layer, call: Call) -> bool:
    """Count a token that the launches of a layer's step have taken in; compact if that is due.

    Args:
        layer: which a `Step` describes.
        call: what brought it, or one like that.

    Returns:
        Whether slots have moved.
    """
    step: Step = layer.step
    if step.tiers:
        if not entering.entered(layer, step.tiers):
            layer.step = None
        return True
    for group, heads, (store, _) in zip(layer.groups, step.stores.heads, step.held, strict=True):
        store.added()
        if group.scorer is None:
            continue
        if heads.sums is not None and group.scorer.running is not None:
            group.scorer.running.count += 1
            continue
        mine, queries = call.heads(group.heads), None
        if "queries" in group.needs:
            (queries,) = group.unturned(layer.seen, group.unscaled(mine.q))
        group.scorer.observe(Segment(layer.seen, 1, queries=queries, predicted=mine.predicted))
    layer.seen += 1
    if layer.policy.anchors is not None or layer.seen == step.due:
        layer.note_peak(layer.seen)
        eviction.finish(layer, layer.seen)
    if not step.outdated:
        return False
    layer.step = None  # what a compaction replaced is freed
    # now, so that tokens in between are all alike
    layer.step = again = _described(layer, call.k, call.v)
    if again is not None:
        prepare(layer.impls[decode_step.name], call.q.squeeze(2), call.k, again.stores)
    return True


@contextmanager
def recording() -> Iterator[list[tuple[Layer, Call]]]:
    """Tokens only launch inside, and are not counted; gives the layers, and what is like a token.

    Where `launches` says that they cannot be repeated, a token must not come.
    """
    _mine.recorded = []
    try:
        yield _mine.recorded
    finally:
        del _mine.recorded


def launches(layer: Layer) -> Hashable:
    """All that the launches of a layer's next token are given, as a CUDA graph would fix it.

    None if something else than launches is to be done for it, or they have not been made before.
    """
    if layer.seen and not layer.holds:
        return ()  # a layer without attention
    step = layer.step
    if not isinstance(step, Step) or layer.policy.anchors or not step.holds(layer.groups):
        return None
    if layer.predictor or any("queries" in group.needs for group in layer.groups):
        return None  # scores of a token are made by the model's code, or from its queries
    return given(layer.impls.get(decode_step.name, ""), step.stores)


def forget(layer: Layer) -> None:
    """Let go of what a step is told of the layer, before several tokens replace what it holds."""
    layer.note_peak(layer.seen)
    if layer.step is not REFUSED:
        layer.step = None


def _served(group: HeadGroup) -> bool:
    """Whether a token's slots can be stored, attended to and counted by one op."""
    return type(group.store) is PackedStore  # no other one, that wants to see what is appended


def _described(layer: Layer, k: Tensor, v: Tensor) -> Step | None:
    """The layer as it is before its next token `k`, `v` `[B, H, 1, D]`.

    None if a scorer does more than adding up what slots receive, or looking at queries.
    """
    found, held = list[Heads](), list[tuple[PackedStore, int]]()
    seen, due = layer.seen, layer.next_compaction(layer.seen)
    tiers = [entering.opened(g, seen) for g in layer.groups] if entering.serves(layer) else []
    for i, group in enumerate(layer.groups):
        store, mine = group.store, slice(group.heads.start, group.heads.stop)
        assert isinstance(store, PackedStore)
        store.reserve(k[:, mine], v[:, mine])
        sums = None
        if "rows" in group.needs:
            return None
        if "attention" in group.needs:
            running = None if group.scorer is None else group.scorer.running
            if running is None:
                return None
            room = tiers[i].room + 1 if tiers else store.capacity
            sums = Sums(
                running.room(seen, room), store.order(store.capacity),
                held=store.n - store.used, end=0 if due is None else store.used + due - seen,
                alpha=running.alpha, horizon=running.horizon, keep=running.decay,
            )  # fmt: skip
        if tiers:
            found.append(Heads([tiers[i].part, store.parts()[-1]], sums, None, tiers[i].entering))
        else:
            found.append(Heads(store.parts(), sums, _turned(group, store, seen)))
        held.append((store, store.version))
    return Step(Stores(found, layer.tables), held, due, tiers)


def _turned(group: HeadGroup, store: PackedStore, seen: int) -> Turned | None:
    """How keys are turned where the policy re-indexes positions."""
    if not group.reindex:
        return None
    assert group.rotary is not None
    inv_freq, others = group.rotary.inv_freq.to(store.device), store.n - store.used
    return Turned(inv_freq, store.index(store.capacity), others, seen - store.n)
