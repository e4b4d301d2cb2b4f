"""Implementation of `sum_queries` for a CPU; importing it imports no numba."""

import torch
from torch import Tensor

from kvsearch_kernels.decode_step.numba_impl import back
from kvsearch_kernels.numba_args import why_not_memory
from kvsearch_kernels.sum_queries.reference import why_not_sums

__all__ = ["forward", "why_not"]


def why_not(
    q: Tensor, total: Tensor, outer: Tensor | None, inv_freq: Tensor, lengths: Tensor,
    ahead: Tensor, *, skip: int = 0,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    sums = [total] if outer is None else [total, outer]
    if reason := why_not_memory(q, inv_freq, lengths, ahead, *sums):
        return reason
    return why_not_sums(q, sums, inv_freq, lengths, ahead)


def forward(
    q: Tensor, total: Tensor, outer: Tensor | None, inv_freq: Tensor, lengths: Tensor,
    ahead: Tensor, *, skip: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.numba_loops.queries import add_queries
    from kvsearch_kernels.numba_loops.turning import turn_back

    at = int(lengths.flatten()[0]) + int(ahead)
    if at < skip or not q.numel():
        return total, outer
    kind = torch.promote_types(q.dtype, torch.float32)
    plain = q.detach().to(kind, copy=True).contiguous()
    turn_back(plain.numpy(), back(inv_freq.numpy().tobytes(), at, q.dtype))
    plain = plain.to(q.dtype).float()
    products = total.new_empty(0, 0, 0) if outer is None else outer
    add_queries(plain.numpy(), total.numpy(), products.numpy())
    return total, outer
