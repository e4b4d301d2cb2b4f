"""Implementation of `evict_in_place` for a CPU, for intervals of one token.

There a token costs torch some 25 operations on a few hundred numbers. Products and sums are rounded
in another order than the reference's. Importing it imports no numba.
"""

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.evict_in_place.reference import Evictions
from kvsearch_kernels.numba_args import why_not_memory

__all__ = ["forward", "why_not"]

SHARED = 1.3e6  # operations a token and layer that torch's threads would have to spare it


def why_not(
    slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor, kept: Tensor,
    weights: Tensor, how: Evictions,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None; slower than torch is one."""
    vectors, others = (slots, queries, new, kept), (sums, born, weights)
    if reason := why_not_memory(*vectors, *others):
        return reason
    if how.smooth is not None or how.older is not None:
        return "ranks must be of one interval's sums, and not smoothed"
    if new.shape[-2] != 1:
        return f"intervals must be of one token, got {new.shape[-2]}"
    kind = queries.dtype
    if kind not in (torch.float32, torch.float64) or any(x.dtype is not kind for x in vectors):
        return f"vectors must share float32 or float64, got {[x.dtype for x in vectors]}"
    if sums.dtype is not torch.float32 or not all(x.is_contiguous() for x in (*vectors, *others)):
        return "sums must be float32, and all tensors contiguous"
    # the loop has one thread; with more, torch catches up where a token has many heads and slots
    work = 4 * queries[0].numel() * slots.shape[3]
    if work * (1 - 1 / torch.get_num_threads()) >= SHARED:
        return f"torch's {torch.get_num_threads()} threads are faster"
    return None


def forward(
    slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor, kept: Tensor,
    weights: Tensor, how: Evictions,
) -> Tensor:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.numba_loops.one_by_one import one_by_one

    (J, heads, _, D), out = queries.shape, torch.zeros_like(queries)
    ages = np.empty(0, np.float32) if how.divisors is None else how.divisors.numpy()
    one_by_one(
        queries.numpy(), new.reshape(J, 2, heads, D).numpy(), kept.reshape(J, 2, heads, D).numpy(),
        slots.view(2, heads, -1, D).numpy(), sums.view(-1, sums.shape[-1]).numpy(),
        born.view(-1, born.shape[-1]).numpy(),
        (how.seen, how.first, how.last, how.recent, int(how.forgets)),
        float(weights), 0.0 if how.forgets else how.carry, ages, how.softcap or 0.0, out.numpy(),
    )  # fmt: skip
    return out
