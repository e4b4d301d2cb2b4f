"""Triton implementation of `sum_queries`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.configs import SUM_ROWS, SUM_WARPS
from kvsearch_kernels.launch import ceil_div, emulated, on, rows_last, why_not_heads, why_not_here

__all__ = ["emulated", "forward", "why_not"]


def why_not(
    q: Tensor, total: Tensor, outer: Tensor | None, inv_freq: Tensor, lengths: Tensor,
    ahead: Tensor, *, skip: int = 0,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    sums = [total] if outer is None else [total, outer]
    if reason := why_not_here(q, inv_freq, lengths, ahead, *sums):
        return reason
    if reason := why_not_heads(q.unsqueeze(2)):
        return reason
    return why_not_sums(q, sums, inv_freq, lengths, ahead)


def why_not_sums(
    q: Tensor, sums: list[Tensor], inv_freq: Tensor, lengths: Tensor, ahead: Tensor
) -> str | None:
    """Reason why these sums do not fit the queries `[B, Hq, D]`, or None."""
    B, Hq, D = q.shape
    for x, n in zip(sums, (D, D * (D + 1) // 2), strict=False):
        if x.shape != (B, Hq, n) or x.dtype is not torch.float32 or not x.is_contiguous():
            return f"sums must be [{B}, {Hq}, {n}] float32, contiguous, got {tuple(x.shape)}"
    if inv_freq.dim() != 1 or 2 * inv_freq.shape[0] > D or not inv_freq.is_contiguous():
        return f"angles must be [{D // 2}] or fewer, contiguous, got {tuple(inv_freq.shape)}"
    if inv_freq.dtype is not torch.float32:
        return f"angles must be float32, got {inv_freq.dtype}"
    for what, x in (("lengths", lengths), ("ahead", ahead)):
        if x.dtype is not torch.int32 or not x.numel():
            return f"{what} must be int32, at least one, got {tuple(x.shape)} {x.dtype}"
    return None


def forward(
    q: Tensor, total: Tensor, outer: Tensor | None, inv_freq: Tensor, lengths: Tensor,
    ahead: Tensor, *, skip: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.sum_queries.triton_kernels import add_queries

    B, Hq, D = q.shape
    products, q = outer is not None, rows_last(q)
    if q.numel():
        with on(q.device):
            add_queries[(B * Hq, ceil_div(D, SUM_ROWS) if products else 1)](
                q, inv_freq, lengths, ahead, total, total if outer is None else outer,
                *q.stride()[:2], Hq, skip, D=D, HALF=inv_freq.shape[0], PRODUCTS=products,
                ROWS=SUM_ROWS, num_warps=SUM_WARPS,
            )  # fmt: skip
    return total, outer
