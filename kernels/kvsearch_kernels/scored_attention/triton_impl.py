"""`scored_attention` as two passes: attention with its log-sum-exp, then the scores."""

from functools import lru_cache

import torch
from torch import Tensor

from kvsearch_kernels.configs import SCORE
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    emulated,
    on,
    rows_last,
    why_not_heads,
    why_not_here,
)
from kvsearch_kernels.lifetime_attention import triton_impl as attention

__all__ = ["emulated", "forward", "why_not"]


@lru_cache(maxsize=64)
def _lives(N: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Key j is born at token j and never dies; the same tensors, so that they are planned once."""
    birth = torch.arange(N, dtype=torch.int32, device=device)
    return birth, torch.full_like(birth, N)


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_weights: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(q, k, v, row_weights) or why_not_heads(q, k, v):
        return reason
    M, N = q.shape[2], k.shape[2]
    if M > N:
        return f"there must be at least as many keys as queries, got {N} and {M}"
    if row_weights.shape != (M,):
        return f"row_weights must have shape ({M},), got {tuple(row_weights.shape)}"
    birth = torch.empty(N, dtype=torch.int32, device="meta")
    return attention.why_not_lives(birth, birth, N, N - M, M, scale, softcap)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_weights: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    M, N = q.shape[2], k.shape[2]
    birth, death = _lives(N, q.device)
    out, lse = attention.forward(
        q, k, v, birth, death, first_query=N - M, scale=scale, softcap=softcap
    )
    return out, _received(q, k, lse, row_weights, (birth, death), scale, softcap)


def _received(
    q: Tensor, k: Tensor, lse: Tensor, row_weights: Tensor, lives: tuple[Tensor, Tensor],
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """What each key received `[B, H, N]`, from the log-sum-exps `[B, Hq, M]`: no map is written."""
    from kvsearch_kernels.scored_attention.triton_kernels import score

    B, Hq, M, D = q.shape
    H, N = k.shape[1], k.shape[2]
    out = torch.empty(B, H, N, dtype=torch.float32, device=q.device)
    if out.numel() == 0 or M == 0:
        return out.zero_()
    q, k = rows_last(q), rows_last(k)
    tile = SCORE[D, q.element_size()]
    with on(q.device):
        score[(ceil_div(N, tile.rows), B * H)](
            q, k, lse.float().contiguous(), row_weights.float().contiguous(), *lives, out,
            *q.stride()[:3], *k.stride()[:3],
            M, N, N - M, H, Hq // H, scale, softcap or 1.0,
            D=D, BM=tile.columns, BN=tile.rows, HAS_CAP=softcap is not None,
            **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
