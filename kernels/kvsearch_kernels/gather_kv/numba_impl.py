"""Implementation of `gather_kv` for a CPU; importing it imports no numba."""

import torch
from torch import Tensor

from kvsearch_kernels.launch import check_slots, why_not_slots
from kvsearch_kernels.numba_args import slots_at, why_not_memory

__all__ = ["forward", "why_not"]


def why_not(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if by is not None or inv_freq is not None:
        return "there is no loop that turns keys"
    if reason := why_not_memory(x, slots):
        return reason
    if x.dim() != 4:
        return f"x must have 4 axes, got shape {tuple(x.shape)}"
    return why_not_slots(x, slots)


def forward(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> Tensor:
    """As `reference`."""
    from kvsearch_kernels.numba_loops.places import gather

    check_slots(slots, x.shape[2])
    B, H, N, D = x.shape
    out = torch.empty(B, H, slots.shape[-1], D, dtype=x.dtype, device="cpu")
    size = x.element_size()
    source = (x.data_ptr(), *(size * stride for stride in x.stride()[:3]))
    at, _held = slots_at(slots, B, H)  # `at` points to what it holds
    if not gather(source, D * size, N, at, out.view(torch.uint8).numpy()):
        raise out_of_range(slots, N)
    return out


def out_of_range(slots: Tensor, n: int) -> IndexError:
    """What the reference raises, in our words."""
    low, high = int(slots.min()), int(slots.max())
    return IndexError(f"slots {low} to {high} are out of range, there are {n}")
