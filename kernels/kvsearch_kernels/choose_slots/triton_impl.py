"""Triton implementation of `choose_slots`: one launch for all stores, a program for each voter.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows, rows_at
from kvsearch_kernels.choose_slots.reference import Ask, Choice
from kvsearch_kernels.configs import choose_warps
from kvsearch_kernels.launch import emulated, on, per_head, rows_last, why_not_here
from kvsearch_kernels.sending import sent

__all__ = ["emulated", "forward", "why_not"]

MOST_SLOTS, MOST_TIERS = 4096, 4  # more slots than these would spill registers
COLUMNS = 11 + MOST_TIERS - 1  # of a row of the table, see `_rows`


def why_not(asks: Sequence[Ask]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(*(x for ask in asks for x in (ask.scores, ask.pools))):
        return reason
    return next(filter(None, map(_why_not, asks)), None)


def _why_not(ask: Ask) -> str | None:
    """Reason why the kernel cannot choose for this store, or None."""
    scores, pools = ask.scores, ask.pools
    if scores.dtype is not torch.float32 or scores.dim() != 3:
        return f"scores must be [B, V, N] float32, got {tuple(scores.shape)} {scores.dtype}"
    if pools.dtype is not torch.uint8 or not per_head(scores, pools):
        return f"pools must be uint8, [N] or one list a voter, got {tuple(pools.shape)}"
    if scores.shape[-1] > MOST_SLOTS:
        return f"there may be {MOST_SLOTS} slots, got {scores.shape[-1]}"
    if len(ask.counts) > MOST_TIERS:
        return f"there may be {MOST_TIERS} tiers, got {len(ask.counts)}"
    return None


def forward(asks: Sequence[Ask]) -> list[Choice]:
    """As `reference`."""
    from kvsearch_kernels.choose_slots.triton_kernels import choose

    made, rows = [], []
    given = [(rows_last(ask.scores), rows_last(ask.pools)) for ask in asks]
    for ask, (scores, pools) in zip(asks, given, strict=True):
        B, V, N = scores.shape
        keep = torch.empty(B, V, N - ask.gone, dtype=torch.int64, device=scores.device)
        tiers = torch.empty(keep.shape, dtype=torch.uint8, device=keep.device)
        made.append((keep, tiers if ask.counts else None))
        rows.append(_rows(ask, scores, pools.expand(B, V, N), keep, tiers))
    if not any(keep.numel() for keep, _ in made):
        return made
    table, device = np.concatenate(rows), made[0][0].device
    block = max(64, 1 << (max(ask.scores.shape[-1] for ask in asks) - 1).bit_length())
    with on(device):
        choose[(len(table),)](sent(table, device), BLOCK=block, num_warps=choose_warps(block))
    return made


def _rows(ask: Ask, scores: Tensor, before: Tensor, keep: Tensor, tiers: Tensor) -> Rows:
    """A row of the table for each voter of a store `[B * V, COLUMNS]`.

    0 scores, 1 pools before, 2 slots that stay, 3 their pools, 4 slots, 5 how many are dropped,
    6 sinks, 7 recent window, 8 and 9 first and newest slots in 16 bits, 10 tiers; then the slots of
    all tiers but the last.
    """
    rows = np.zeros((*scores.shape[:2], COLUMNS), np.int64)
    for i, x in enumerate((scores, before, keep, tiers)):
        rows[..., i] = rows_at(x)
    rows[..., 4:11] = (
        scores.shape[-1], ask.gone, ask.sinks, ask.recent, ask.fp16_sinks, ask.fp16_recent,
        len(ask.counts),
    )  # fmt: skip
    rows[..., 11 : 11 + len(ask.counts[:-1])] = ask.counts[:-1]
    return rows.reshape(-1, COLUMNS)
