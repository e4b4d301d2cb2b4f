"""`scored_attention` as two passes: attention with its log-sum-exp, then the scores."""

from functools import lru_cache

import torch
from torch import Tensor

from kvsearch_kernels.launch import emulated, why_not_heads, why_not_here
from kvsearch_kernels.lifetime_attention import triton_impl as attention
from kvsearch_kernels.score_keys import triton_impl as scores

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
    received = scores.forward(
        q, k, lse, row_weights, birth, death, first_query=N - M, scale=scale, softcap=softcap
    )
    return out, received
