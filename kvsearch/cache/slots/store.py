"""What a store of one layer's slots can do, and how slots are picked."""

from typing import Protocol

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Ran
from kvsearch.policy import LayerLayout


class Store(Protocol):
    """Slots of one layer in order of time; `DenseStore` evaluates, `PackedStore` deploys.

    Attributes:
        n: tokens held.
        residual: newest tokens that no compaction has seen, in 16 bits.
        ran: where to note which implementation of an op ran.
    """

    n: int
    residual: int
    ran: Ran

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, H, M, D]`, already rounded to 16 bits."""

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]`, as attention sees them."""

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` (`[N]` or `[B, V, N]`), then move slots to `pools`."""

    def load(self, k: Tensor, v: Tensor, pools: Tensor, residual: int, lead: int = 0) -> None:
        """Start from 16-bit values `[B, H, lead + N, D]`; the last `residual` are residual.

        The `lead` tokens after the 16-bit sinks are gone already; they are given because the first
        tokens that are held share their scales.
        """

    def slot_pools(self) -> Tensor:
        """Pool of every slot, `[N]` or `[B, V, N]` uint8; the last pool is 16 bits."""

    @property
    def device(self) -> torch.device:
        """Where the slots are."""

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of the tensors held."""

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""


def entering(layer: LayerLayout, before: int, after: int, in_tier: int) -> tuple[int, int]:
    """Tokens of the one tier that a compaction leaves there, and tokens that it moves there.

    Eviction is by age: what is dropped was in the tier.

    Args:
        layer: integers of the layer.
        before, after: slots held before and after the compaction.
        in_tier: slots in the tier before.
    """
    left = max(0, in_tier - (before - after))
    return left, layer.tier_counts(after)[0] - left


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Take slots `index` (`[N]`, or per head `[B, V, N]`) of `x` `[B, H, T, D]`."""
    if index.dim() == 1:
        return x.index_select(2, index)
    B, H, T, D = x.shape
    index = index.expand(B, H, -1)
    if x.device.type != "cpu" or not x.is_contiguous():
        return x.gather(2, index.unsqueeze(-1).expand(*index.shape, D))
    first = torch.arange(0, B * H * T, T, device=x.device).view(B, H, 1)
    rows = x.view(-1, D).index_select(0, (index + first).view(-1))  # copies rows, not numbers
    return rows.view(*index.shape, D)


_slots: dict[torch.device, Tensor] = {}


def first_slots(n: int, device: torch.device) -> Tensor:
    """The indices of `n` slots, in a row; what is kept of them on a device is twice as long."""
    if device not in _slots or _slots[device].shape[0] < n:
        _slots[device] = torch.arange(max(2 * n, 1024), device=device)
    return _slots[device][:n]


def first_of(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` true entries of `mask` `[..., N]` are; what is false comes after."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
