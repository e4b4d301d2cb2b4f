"""The error budget: a kernel may err at most twice as much as plain torch, plus one rounding."""

import torch
from torch import Tensor

# Of the largest value. On a GPU exp2 is approximate and tensor cores cut sums off instead of
# rounding them; what is wrong (a mask, an index, a code, TF32) is off by far more.
HARDWARE = 128 * torch.finfo(torch.float32).eps


def over_budget(
    what: str, got: Tensor, yard: Tensor, exact: Tensor, *, room: float = 0.0, slack: float = 0.0
) -> str | None:
    """Reason why `got` is worse than its budget, or None.

    Args:
        what: name of the result, for the reason.
        got: what a kernel returned.
        yard: the same by plain torch, in the precision that `got` is held to.
        exact: the same in fp64; where it is infinite, `got` must be equal.
        room: error that the kernel's own inputs carry, where they differ from the exact ones.
        slack: likewise, as a share of the largest exact value.
    """
    if got.shape != exact.shape:
        return f"{what} has shape {tuple(got.shape)} instead of {tuple(exact.shape)}"
    found, plain = got.double(), yard.double()
    finite = exact.isfinite()
    if not torch.equal(found[~finite], exact[~finite]):
        return f"{what} is finite or NaN where it must be infinite"
    if not finite.any():
        return None
    largest = exact[finite].abs().max()
    error = float((found - exact)[finite].abs().max())
    allowed = float(
        2 * (plain - exact)[finite].abs().max()
        + (torch.finfo(yard.dtype).eps + slack) * largest
        + room
    )
    # written so that a NaN is over the budget
    return None if error <= allowed else f"{what} is off by {error:.3g}, {allowed:.3g} is allowed"
