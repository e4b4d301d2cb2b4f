"""Implementation of `time_order` for a CPU: counted, not sorted; importing it imports no numba."""

import torch
from torch import Tensor

from kvsearch_kernels.numba_args import why_not_memory

__all__ = ["forward", "why_not"]


def why_not(pools: Tensor) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if pools.dtype is not torch.uint8 or not pools.dim():
        return f"pools must be [..., N] uint8, got {tuple(pools.shape)} {pools.dtype}"
    return why_not_memory(pools)


def forward(pools: Tensor) -> Tensor:
    """As `reference`."""
    from kvsearch_kernels.numba_loops.choosing import time_order

    out = torch.empty(pools.shape, dtype=torch.int64, device="cpu")
    if out.numel():
        n = pools.shape[-1]
        time_order(pools.reshape(-1, n).numpy(), out.view(-1, n).numpy())
    return out
