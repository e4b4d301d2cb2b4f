"""Tensors that are made anew after a compaction and lie where they lay before."""

from collections.abc import Callable

from torch import Tensor


class Lying:
    """One such tensor. Captured launches read it, so on a device its address should not change."""

    def __init__(self) -> None:
        self._now: Tensor | None = None
        self._at: Tensor | None = None  # where it lay before

    def get(self, size: int, make: Callable[[], Tensor]) -> Tensor:
        """The tensor, `[..., size]`; made by `make` if it was forgotten or has another size."""
        if self._now is None or self._now.shape[-1] != size:
            found, at = make(), self._at
            if at is not None and at.shape == found.shape and at.device == found.device:
                found = found if found.is_cpu else at.copy_(found)
            self._now = self._at = found
        return self._now

    def forget(self) -> None:
        """Have it made anew when it is next asked for."""
        self._now = None
