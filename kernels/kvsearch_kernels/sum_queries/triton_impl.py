"""Triton implementation of `sum_queries`; importing it imports no Triton."""

from torch import Tensor

from kvsearch_kernels.configs import SUM_ROWS, SUM_WARPS
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    emulated,
    on,
    rows_last,
    why_not_heads,
    why_not_here,
)
from kvsearch_kernels.sum_queries.reference import why_not_sums

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
                ROWS=SUM_ROWS, **FUSED, num_warps=SUM_WARPS,
            )  # fmt: skip
    return total, outer
