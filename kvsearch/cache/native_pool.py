"""The 16-bit pool of a layer that decodes: fixed capacity, and its length on the device.

A token is written behind the last one, so that between two compactions nothing is allocated or
moved, and no number that a launch is given changes. Capacity is what the policy holds at its next
compaction; where none is due, it is an eighth more than what is held.
"""

import torch
from torch import Tensor

from kvsearch.cache.formats import Held
from kvsearch.policy import LayerLayout
from kvsearch_kernels.copy_rows import Copy

LEAST = 32  # slots by which a pool grows that nothing bounds


def spare(layer: LayerLayout, held: int, residual: int) -> int:
    """Slots to have free behind `held`, of which the last `residual` wait for a compaction."""
    if layer.interval is None or layer.policy.trigger == "prompt":
        return max(LEAST, held // 8)
    return layer.interval - residual % layer.interval


class NativePool:
    """Keys and values in 16 bits, in the front of pools of fixed capacity.

    Attributes:
        keys, values: pools `[B, H, C, D]`.
        lengths: slots in use of each head `[B, H]` int32.
        used: the same as a number; all heads of a state are alike.
    """

    def __init__(
        self, keys: Tensor, values: Tensor, used: int, before: "NativePool | None" = None
    ) -> None:
        self.keys, self.values, self.used = keys, values, used
        self.lengths: Tensor
        if before is None or before.lengths.shape != keys.shape[:2]:
            self.lengths = torch.full(keys.shape[:2], used, dtype=torch.int32, device=keys.device)
            return
        self.lengths = before.lengths  # where launches find them already
        if before.used != used:
            self.lengths.fill_(used)

    @classmethod
    def of(cls, held: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], capacity: int,
           native: torch.dtype, before: "NativePool | None" = None) -> "NativePool":  # fmt: skip
        """Pools of `capacity` that hold what is `held`, for tokens like the `new` ones.

        They take the place of those `before`, whose lengths they go on with.
        """
        pools = [x.new_empty(*x.shape[:2], capacity, x.shape[3], dtype=native) for x in new]
        used = 0
        if held is not None:
            used = held[0].shape[2]
            for pool, old in zip(pools, held, strict=True):
                pool[:, :, :used] = old
        return cls(pools[0], pools[1], used, before)

    @property
    def capacity(self) -> int:
        """Slots there is room for."""
        return self.keys.shape[2]

    def replace(self, held: tuple[Tensor, Tensor] | None, copies: list[Copy]) -> None:
        """Hold other slots, at the same place in memory, once the `copies` are made."""
        used = 0 if held is None else held[0].shape[2]
        if held is not None:
            for pool, new in zip((self.keys, self.values), held, strict=True):
                if new.data_ptr() != pool.data_ptr():  # else it is there already
                    copies.append(Copy(pool[:, :, :used], new))
        if used != self.used:
            copies.append(Copy(self.lengths, used))
        self.used = used

    def shown(self) -> tuple[Held | None, Held | None]:
        """What is in use, as views."""
        if not self.used:
            return None, None
        return (self.keys[:, :, : self.used],), (self.values[:, :, : self.used],)
