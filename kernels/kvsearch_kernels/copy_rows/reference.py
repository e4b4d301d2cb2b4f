"""Meaning of `copy_rows`."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Copy:
    """A tensor to write to.

    Attributes:
        to: what is written, of any shape; several copies may not write to the same memory.
        of: what it becomes: a tensor of its shape and type that shares no memory with any `to`, or
            a number, for int32.
    """

    to: Tensor
    of: Tensor | int


def reference(copies: Sequence[Copy]) -> None:
    """Write to all of them."""
    for copy in copies:
        if isinstance(copy.of, Tensor):
            copy.to.copy_(copy.of)
        else:
            copy.to.fill_(copy.of)
