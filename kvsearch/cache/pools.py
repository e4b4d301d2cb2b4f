"""What of a packed store moving and reading its slots take, and how slots of pools are found."""

from typing import Protocol

import torch
from torch import Tensor

from kvsearch.cache.formats import Codec, Held, Ran
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.quantize_kv import Packed


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
