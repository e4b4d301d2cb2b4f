"""Triton implementation of `score_keys`; importing it imports no Triton."""

from typing import Literal

import torch
from torch import Tensor

from kvsearch_kernels.configs import SCORE
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    emulated,
    int32,
    on,
    rows_last,
    why_not_heads,
    why_not_here,
)
from kvsearch_kernels.lifetime_attention.triton_impl import why_not_lives

__all__ = ["emulated", "forward", "why_not"]


def why_not(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    row_weights: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    reduce: Literal["sum", "max"] = "sum",
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(q, k, lse, row_weights, birth, death) or why_not_heads(q, k):
        return reason
    if lse.shape != q.shape[:3]:
        return f"lse must have shape {tuple(q.shape[:3])}, got {tuple(lse.shape)}"
    if row_weights.shape != (q.shape[2],):
        return f"row_weights must have shape ({q.shape[2]},), got {tuple(row_weights.shape)}"
    if reduce not in ("sum", "max"):
        return f"reduce must be sum or max, got {reduce!r}"
    return why_not_lives(birth, death, k.shape[2], first_query, q.shape[2], scale, softcap)


def forward(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    row_weights: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    reduce: Literal["sum", "max"] = "sum",
) -> Tensor:
    """As `reference`."""
    from kvsearch_kernels.score_keys.triton_kernels import score

    B, Hq, M, D = q.shape
    H, E = k.shape[1], k.shape[2]
    out = torch.empty(B, H, E, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or M == 0:
        return out.zero_()
    q, k = rows_last(q), rows_last(k)
    tile = SCORE[D, q.element_size()]
    with on(q.device):
        score[(ceil_div(E, tile.rows), B * H)](
            q, k, lse.float().contiguous(), row_weights.float().contiguous(),
            int32(birth), int32(death), out,
            *q.stride()[:3], *k.stride()[:3],
            M, E, first_query, H, Hq // H, scale, softcap or 1.0,
            D=D, BM=tile.columns, BN=tile.rows, HAS_CAP=softcap is not None, MAX=reduce == "max",
            **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
