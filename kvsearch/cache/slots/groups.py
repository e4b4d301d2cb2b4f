"""Compaction of keys that share scales with their neighbours in time (KIVI)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Held
from kvsearch.cache.slots.pools import Pools, as_held, first_slots
from kvsearch.cache.slots.store import entering
from kvsearch.policy import LayerLayout
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.repack_kv import NewPool, repack_kv


class Grouped(Pools, Protocol):
    """What `pools.Pools` are, and what the slots of the one tier follow from.

    Attributes:
        layer: integers of the layer.
        n: slots held.
        residual: newest tokens that no compaction has seen.
    """

    layer: LayerLayout
    n: int
    residual: int


def compact_groups(moves: Sequence[tuple[Grouped, int]]) -> None:
    """Let each store of a layer hold its newest slots and its sinks, so many in all."""
    sizes = [0 if s.keys[0] is None else s.keys[0][0].shape[2] for s, _ in moves]
    lefts = [
        entering(store.layer, store.n, n, size)
        for (store, n), size in zip(moves, sizes, strict=True)
    ]
    values = _values([(s, new) for (s, _), (_, new) in zip(moves, lefts, strict=True) if new])
    for (store, n), size, (left, new) in zip(moves, sizes, lefts, strict=True):
        fresh: list[Held | None] = [None, None]
        if new:
            fresh = [store.codecs[0][0].encode(_entering(store, 0, new), store.ran), next(values)]
        _hold(store, size, left, new, fresh)
        store.n, store.residual = n, 0


def _entering(store: Grouped, side: int, new: int) -> Tensor:
    """Keys (0) or values (1) `[B, H, new, D]` that enter the tier."""
    native, first = (store.keys, store.values)[side][-1], store.layer.policy.fp16_sinks
    assert native is not None
    return native[0][:, :, first : first + new]


def _values(moves: Sequence[tuple[Grouped, int]]) -> Iterator[Held]:
    """What enters the tiers of values, each encoded for itself; by one launch where there is one.

    A kernel is given values as keys, too: it makes both sides of a pool.
    """
    if len(moves) > 1:
        pools = []
        for store, new in moves:
            x, fmt = _entering(store, 1, new), store.codecs[0][1].fmt
            pools.append(NewPool(first_slots(new, x.device), [Part(x, x)], None, (fmt, fmt)))
        first, ran = moves[0][0], dict[str, str]()
        types = {"dtype": first.dtype, "native": first.codecs[-1][0].native}
        if repack_kv.pick(pools, **types) == "triton":
            made = repack_kv.record(ran, pools, **types)
            for store, _ in moves:
                store.ran.update(ran)
            return iter([as_held(values) for _, values in made])
    return iter([s.codecs[0][1].encode(_entering(s, 1, new), s.ran) for s, new in moves])


def _hold(
    store: Grouped, size: int, left: int, new: int, fresh: Sequence[Held | None]
) -> None:  # fmt: skip
    """Leave the newest `left` of `size` slots in the tier, and add the `new` ones, encoded.

    Eviction is by age, so the oldest codes go; scales stay while any of their tokens does.
    """
    group, first = store.layer.policy.quantizer.group, store.layer.policy.fp16_sinks
    assert group is not None
    gone, store.lead = divmod(store.lead + size - left, group) if left else (0, 0)
    sides = zip(store.codecs[0], (store.keys, store.values), fresh, strict=True)
    for codec, pools, enters in sides:
        mine, native = pools[0], pools[-1]
        assert native is not None
        kept: Held | None = None
        if mine is not None and left:
            codes, *scales = mine  # values in 16 bits have none
            first_scale = gone if codec.along_tokens else size - left
            kept = (codes[:, :, size - left :], *(x[:, :, first_scale:] for x in scales))
        if enters is not None:
            both = [enters] if kept is None else [kept, enters]
            kept = tuple(torch.cat(x, 2) for x in zip(*both, strict=True))
            ends = (native[0][:, :, :first], native[0][:, :, first + new :])
            pools[-1] = (torch.cat(ends, 2),)
        pools[0] = kept
