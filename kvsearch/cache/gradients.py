"""Gradients through what a cache does to keys and values."""

from torch import Tensor


def straight(rounded: Tensor, x: Tensor) -> Tensor:
    """`rounded`, with the gradient of `x` (straight-through, arXiv:1308.3432).

    Rounding has no gradient of its own, and a cast to 16 bits would round the gradient as well,
    which loses those below 6e-8. Where no gradient is wanted, this is `rounded` itself.
    """
    return rounded.detach() + (x - x.detach()) if x.requires_grad else rounded
