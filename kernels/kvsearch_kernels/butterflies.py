"""The Hadamard transform as sums and differences."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def butterflies(x: "Tensor") -> "Tensor":
    """Hadamard transform of the last axis, a power of two, without its factor.

    Entries are 1 and -1 in the order of Sylvester, so twice the transform is `x` times the length.
    """
    import torch

    n, y, step = x.shape[-1], x, 1
    while step < n:
        a, b = y.unflatten(-1, (n // (2 * step), 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return y
