"""Implementation of `choose_slots` for a CPU, by thresholds; importing it imports no numba."""

from collections.abc import Sequence

import numpy as np
import torch

from kvsearch_kernels.choose_slots.reference import completed, ranks
from kvsearch_kernels.choose_slots.request import Ask, Choice
from kvsearch_kernels.launch import per_head
from kvsearch_kernels.numba_args import why_not_memory

__all__ = ["forward", "why_not"]


def why_not(asks: Sequence[Ask]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    tensors = [x for ask in asks for x in (ask.scores, ask.pools) if x is not None]
    if reason := why_not_memory(*tensors):
        return reason
    for ask in asks:
        scores, pools = ask.scores, ask.pools
        if scores.dtype is not torch.float32 or scores.dim() != 3:
            return f"scores must be [B, V, N] float32, got {tuple(scores.shape)} {scores.dtype}"
        if pools is None:
            continue
        if pools.dtype is not torch.uint8 or not per_head(scores, pools):
            return f"pools must be uint8, [N] or one list a voter, got {tuple(pools.shape)}"
    return None


def forward(asks: Sequence[Ask]) -> list[Choice]:
    """As `reference`."""
    from kvsearch_kernels.numba_loops.choosing import choose

    found: list[Choice] = []
    for ask in asks:
        scores, pools = ranks(ask).contiguous(), ask.pools
        B, V, N = scores.shape
        if pools is None:
            pools = torch.zeros(N, dtype=torch.uint8, device="cpu")
        keep = torch.empty(B, V, N - ask.gone, dtype=torch.int64, device="cpu")
        tiers = torch.empty(keep.shape if ask.counts else 0, dtype=torch.uint8, device="cpu")
        numbers = ask.gone, ask.sinks, ask.recent, ask.fp16_sinks, ask.fp16_recent
        if keep.numel():
            choose(
                scores.view(-1, N).numpy(), pools.expand(B, V, N).contiguous().view(-1, N).numpy(),
                numbers, np.array(ask.counts, np.int64),
                keep.view(-1, N - ask.gone).numpy(), tiers.view(-1, N - ask.gone).numpy(),
            )  # fmt: skip
        found.append(completed(ask, keep, tiers if ask.counts else None))
    return found
