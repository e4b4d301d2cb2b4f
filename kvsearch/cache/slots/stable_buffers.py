"""Buffers of a packed store whose addresses do not change from token to token, nor at compactions.

A table on the device, and launches that are captured in a CUDA graph, read them there. In the pool
in 16 bits a token is written behind the last one, and its length is on the device: so between two
compactions nothing is allocated or moved, and no number that a launch is given changes. Capacity is
what the policy holds at its next compaction; where none is due, it is an eighth more than what is
held.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Held
from kvsearch.policy import LayerLayout
from kvsearch_kernels.copy_rows import Copy, copy_rows

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


class StableBuffer:
    """One such tensor. Captured launches read it, so its address should not change."""

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self._at: Tensor | None = None  # where it lay before

    def get(self, size: int, make: Callable[[], Tensor]) -> Tensor:
        """The tensor, `[..., size]`; made by `make` if it was forgotten or has another size."""
        if self._now is None or self._now.shape[-1] != size:
            copies: list[Copy] = []
            found = self.put(make(), copies)
            copy_rows.reference(copies)
            return found
        return self._now

    def put(self, made: Tensor, copies: list[Copy]) -> Tensor:
        """Let it be what was `made`; what is to be copied to its place is added to `copies`."""
        at = self._at
        # outside of inference mode torch refuses to write to a tensor that was made in it
        closed = at is not None and at.is_inference() and not torch.is_inference_mode_enabled()
        if at is None or closed or at.shape != made.shape or at.device != made.device:
            at = made
        else:
            copies.append(Copy(at, made))
        self._now = self._at = at
        return at

    def forget(self) -> None:
        """Have it made anew when it is next asked for."""
        self._now = None


def back(before: list[Held | None], copies: list[Copy], *sides: list[Held | None]) -> None:
    """Let what the tiers of both sides hold get to where they held as much `before`.

    With full pools every compaction leaves the same shapes, and addresses stay what they were.
    """
    for i, old in enumerate(before):
        side, tier = sides[2 * i // len(before)], i % (len(before) // 2)
        now = side[tier]
        if old is None or now is None or old is now:
            continue
        if all(x.shape == y.shape and x.is_contiguous() for x, y in zip(old, now, strict=True)):
            copies += [Copy(place, new) for place, new in zip(old, now, strict=True)]
            side[tier] = old
