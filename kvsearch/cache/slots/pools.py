"""Pools of a packed store: how their slots are found, and unpacked for one use in order of time."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Codec, Held, Ran
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.quantize_kv import Packed
from kvsearch_kernels.repack_kv import NewPool, repack_kv


class Pools(Protocol):
    """What is held, pool by pool: the part of a `PackedStore` that a compaction changes.

    Attributes:
        codecs: of keys and values of each pool.
        ran: where to note which implementation of each op ran.
        dtype: of values that are decoded to be encoded anew.
        lead: tokens that the first group of scales lacks.
    """

    codecs: list[tuple[Codec, Codec]]
    ran: Ran
    dtype: torch.dtype
    lead: int

    @property
    def keys(self) -> list[Held | None]:
        """What each pool holds of keys, None of nothing."""

    @property
    def values(self) -> list[Held | None]:
        """What each pool holds of values, None of nothing."""

    def counts(self, n: int) -> tuple[int, ...]:
        """Slots of each pool after a compaction left `n`."""

    def order_in_use(self) -> Tensor | None:
        """Where slots in order of time are when pools follow one another; None if in that order."""


def part_in_use(store: Pools, i: int) -> Part:
    """The slots in use of pool `i`."""
    (kc, vc), k, v = store.codecs[i], store.keys[i], store.values[i]
    assert k is not None and v is not None
    return Part(kc.packed(k, store.lead), vc.packed(v), kc.fmt, vc.fmt)


def as_held(x: Tensor | Packed) -> Held:
    """What an op takes and makes, as it is held."""
    if isinstance(x, Tensor):
        return (x,)
    return (x.codes, x.scales.flatten(-2)) if x.scales.shape[-1] else (x.codes,)


_slots: dict[torch.device, Tensor] = {}


def first_slots(n: int, device: torch.device) -> Tensor:
    """The indices of `n` slots, in a row; what is kept of them on a device is twice as long."""
    if device not in _slots or _slots[device].shape[0] < n:
        _slots[device] = torch.arange(max(2 * n, 1024), device=device)
    return _slots[device][:n]


def first_of(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` true entries of `mask` `[..., N]` are; what is false comes after."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]


def place_in_pool(pools: Tensor, kinds: int) -> Tensor:
    """Index of each slot among the slots of its pool, same shape as `pools`."""
    place = torch.zeros(pools.shape, dtype=torch.long, device=pools.device)
    for i in range(kinds):
        mine = pools == i
        place = torch.where(mine, mine.cumsum(-1) - 1, place)
    return place


class Readable(Pools, Protocol):
    """What `Pools` are, and what reading needs besides.

    Attributes:
        n: slots held.
        grouped: whether keys share scales with their neighbours in time.
    """

    n: int
    grouped: bool

    @property
    def device(self) -> torch.device:
        """Where the slots are."""

    @staticmethod
    def repeats(device: torch.device) -> bool:
        """Whether launches count, as they do on a GPU."""


def read(stores: Sequence[Readable]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values `[B, H, N, D]` of stores of a layer.

    A kernel unpacks all of those that it can at once: a pool in 16 bits, of slots of all pools.
    What others hold is unpacked pool by pool, and put into order at once.
    """
    pools = [_whole(store) for store in stores]
    first, ran = next((s for s, p in zip(stores, pools, strict=True) if p), None), dict[str, str]()
    every = [pool for pool in pools if pool is not None]
    made = iter(()) if first is None else iter(repack_kv.record(ran, every, **_types(first)))
    ordered = _in_order([s for s, pool in zip(stores, pools, strict=True) if pool is None])
    found: list[tuple[Tensor, Tensor]] = []
    for store, pool in zip(stores, pools, strict=True):
        if pool is None:
            found.append((next(ordered), next(ordered)))
            continue
        store.ran.update(ran)
        keys, values = next(made)
        assert isinstance(keys, Tensor) and isinstance(values, Tensor)
        found.append((keys, values))
    return found


def _types(store: Readable) -> dict[str, torch.dtype]:
    """Values are read back in the type of the model."""
    return {"dtype": store.dtype, "native": store.dtype}


def _whole(store: Readable) -> NewPool | None:
    """All slots as one pool in 16 bits, where that saves launches and a kernel can make it."""
    native = store.codecs[-1][0].native
    if not store.repeats(store.device) or store.dtype is not native or store.grouped:
        return None
    there = [i for i, x in enumerate(store.keys) if x is not None and x[0].shape[2]]
    order = store.order_in_use()
    packed = any(codec.fmt is not None for i in there for codec in store.codecs[i])
    if order is None and not packed:
        return None  # they are one after the other as they are
    source = first_slots(store.n, store.device) if order is None else order
    pool = NewPool(source, [part_in_use(store, i) for i in there], None, (None, None))
    return pool if repack_kv.pick([pool], **_types(store)) == "triton" else None


def _in_order(stores: Sequence[Readable]) -> Iterator[Tensor]:
    """Keys, then values, of each store: unpacked pool by pool, then in order of time."""
    sides = [(store, which) for store in stores for which in (0, 1)]
    parts = [_unpacked(*side) for side in sides]
    for (store, _), found in zip(sides, parts, strict=True):
        order, x = store.order_in_use(), found[0] if len(found) == 1 else torch.cat(found, 2)
        yield x if order is None else gather_kv.record(store.ran, x, order)


def _unpacked(store: Readable, which: int) -> list[Tensor]:
    """Keys (0) or values (1) of each pool."""
    return [
        store.codecs[i][which].decode(x, store.dtype, store.ran, store.lead)
        for i, x in enumerate((store.keys, store.values)[which])
        if x is not None
    ]
