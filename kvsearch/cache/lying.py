"""Tensors that are made anew after a compaction and lie where they lay before."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsearch.cache.formats import Held
from kvsearch_kernels.copy_rows import Copy, copy_rows


class Lying:
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
