"""Tensors that are made anew after a compaction and lie where they lay before."""

from collections.abc import Callable

import torch
from torch import Tensor

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
        # whoever looks outside of inference mode may not write to what was made in it
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
