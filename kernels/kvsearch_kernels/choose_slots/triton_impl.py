"""Triton implementation of `choose_slots`: one launch, a program for each voter.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.configs import choose_warps
from kvsearch_kernels.launch import emulated, on, per_head, why_not_here

__all__ = ["emulated", "forward", "why_not"]

MOST_SLOTS, MOST_TIERS = 4096, 4  # more slots than these would spill registers


def why_not(
    scores: Tensor,
    pools: Tensor,
    *,
    gone: int,
    sinks: int = 0,
    recent: int = 0,
    counts: Sequence[int] = (),
    fp16_sinks: int = 0,
    fp16_recent: int = 0,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(scores, pools):
        return reason
    if scores.dtype is not torch.float32 or scores.dim() != 3:
        return f"scores must be [B, V, N] float32, got {tuple(scores.shape)} {scores.dtype}"
    if pools.dtype is not torch.uint8 or not per_head(scores, pools):
        return f"pools must be uint8, [N] or one list a voter, got {tuple(pools.shape)}"
    if scores.shape[-1] > MOST_SLOTS:
        return f"there may be {MOST_SLOTS} slots, got {scores.shape[-1]}"
    if len(counts) > MOST_TIERS:
        return f"there may be {MOST_TIERS} tiers, got {len(counts)}"
    return None


def forward(
    scores: Tensor,
    pools: Tensor,
    *,
    gone: int,
    sinks: int = 0,
    recent: int = 0,
    counts: Sequence[int] = (),
    fp16_sinks: int = 0,
    fp16_recent: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """As `reference`."""
    from kvsearch_kernels.choose_slots.triton_kernels import choose

    (B, V, N), device = scores.shape, scores.device
    keep = torch.empty(B, V, N - gone, dtype=torch.int64, device=device)
    tiers = torch.empty(keep.shape, dtype=torch.uint8, device=device) if counts else None
    if keep.numel() == 0:
        return keep, tiers
    before = pools.expand(B, V, N)
    block = max(64, 1 << (N - 1).bit_length())
    better = [*counts[:-1], 0, 0, 0][: MOST_TIERS - 1]
    with on(device):
        choose[(B * V,)](
            scores, before, keep, before if tiers is None else tiers,
            *scores.stride(), *before.stride(), N, V, gone, sinks, recent, *better,
            fp16_sinks, fp16_recent, TIERS=len(counts), BLOCK=block,
            num_warps=choose_warps(block),
        )  # fmt: skip
    return keep, tiers
