"""Triton implementation of `choose_slots`: one launch for all stores, a program for each voter.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows, rows_at
from kvsearch_kernels.choose_slots.request import Ask, Choice
from kvsearch_kernels.configs import choose_warps
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.launch import FUSED, emulated, on, per_head, rows_last, why_not_here

__all__ = ["emulated", "forward", "why_not"]

MOST_SLOTS, MOST_TIERS = 4096, 4  # more slots than these would spill registers
COLUMNS = 24 + MOST_TIERS - 1  # of a row of the table, see `_rows`


def why_not(asks: Sequence[Ask]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(*(x for ask in asks for x in _given(ask))):
        return reason
    return next(filter(None, map(_why_not, asks)), None)


def _given(ask: Ask) -> list[Tensor]:
    """All tensors of `ask`."""
    held = ask.held
    more = () if held is None else (held.sums, held.born, held.divisors)
    every = (ask.scores, ask.pools, ask.places, ask.after, *more)
    return [x for x in every if x is not None]


def _why_not(ask: Ask) -> str | None:
    """Reason why the kernel cannot choose for this store, or None."""
    scores, held = ask.scores, ask.held
    if scores.dtype is not torch.float32 or scores.dim() != 3:
        return f"scores must be [B, V, N] float32, got {tuple(scores.shape)} {scores.dtype}"
    for what, x, dtype in (("pools", ask.pools, torch.uint8), ("places", ask.places, torch.int64)):
        if x is not None and (x.dtype is not dtype or not per_head(scores, x)):
            name = str(dtype).removeprefix("torch.")
            return f"{what} must be {name}, [N] or one list a voter, got {tuple(x.shape)}"
    if ask.after is not None and (ask.after.dtype is not torch.uint8 or ask.after.dim() != 1):
        return f"pools after must be [N'] uint8, got {tuple(ask.after.shape)} {ask.after.dtype}"
    if max(scores.shape[-1], ask.room or 0) > MOST_SLOTS:
        return f"there may be {MOST_SLOTS} slots, got {max(scores.shape[-1], ask.room or 0)}"
    if max(len(ask.counts), ask.kinds - 1) > MOST_TIERS:
        return f"there may be {MOST_TIERS} tiers, got {max(len(ask.counts), ask.kinds - 1)}"
    if held is None:
        return None
    if held.sums.dtype is not torch.float32 or held.sums.shape != scores.shape:
        return f"sums must be [B, V, N] float32, got {tuple(held.sums.shape)} {held.sums.dtype}"
    born, divisors = held.born, held.divisors
    if born is not None and (born.dtype is not torch.int32 or born.shape != scores.shape):
        return f"births must be [B, V, N] int32, got {tuple(born.shape)} {born.dtype}"
    if divisors is not None and (divisors.dtype is not torch.float32 or divisors.stride(0) != 1):
        return f"divisors must be [A] float32, got {tuple(divisors.shape)} {divisors.dtype}"
    return None


def forward(asks: Sequence[Ask]) -> list[Choice]:
    """As `reference`."""
    from kvsearch_kernels.choose_slots.triton_kernels import choose

    made, rows = [], []
    kept: list[Tensor] = []  # copies whose addresses are in the table, until the launch
    for ask in asks:
        made.append(_empty(ask))
        rows.append(_rows(ask, made[-1], kept))
    if not any(choice.keep.numel() for choice in made):
        return made
    table, device = np.concatenate(rows), made[0].keep.device
    most = max(max(ask.scores.shape[-1], ask.room or 0) for ask in asks)
    block = max(64, 1 << (most - 1).bit_length())
    with on(device):
        choose[(len(table),)](
            sent(table, device), BLOCK=block, **FUSED, num_warps=choose_warps(block)
        )
    return made


def _empty(ask: Ask) -> Choice:
    """Memory for an answer."""
    B, V, N = ask.scores.shape
    held, n, lies = ask.held, N - ask.gone, ask.room is not None
    room = n if ask.room is None else ask.room

    def new(size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(B, V, size, dtype=dtype, device=ask.scores.device)

    return Choice(
        new(n, torch.int64),
        new(room, torch.uint8) if ask.counts else None,
        new(n, torch.int64) if lies else None,
        new(room, torch.int64) if lies else None,
        None if held is None else new(room, torch.float32),
        None if held is None or held.born is None else new(room, torch.int32),
    )


def _rows(ask: Ask, choice: Choice, kept: list[Tensor]) -> Rows:
    """A row of the table for each voter of a store `[B * V, COLUMNS]`.

    0 scores, 1 pools before, 2 slots that stay, 3 their pools, 4 slots, 5 how many are dropped,
    6 sinks, 7 recent window, 8 and 9 first and newest slots in 16 bits, 10 tiers, 11 room,
    12 pools that slots lie in, 13 places, 14 pools after, 15 source, 16 order; of what is held
    17 sums, 18 births, 19 divisors, 20 tokens seen, 21 whether it forgets, and of the answer
    22 sums, 23 births; then the slots of all tiers but the last. What is not there has address 0;
    what is must be `kept` until the launch.
    """
    B, V, N = ask.scores.shape
    held, rows = ask.held, np.zeros((B, V, COLUMNS), np.int64)
    given = {0: ask.scores, 1: ask.pools, 13: ask.places, 14: ask.after}
    if held is not None:
        given |= {17: held.sums, 18: held.born}
        rows[..., 20:22] = held.seen, held.forgets
        if held.born is not None and held.divisors is not None:
            rows[..., 19] = held.divisors.data_ptr()
            kept.append(held.divisors)
    for column, x in given.items():
        if x is not None:
            x = rows_last(x)
            kept.append(x)
            rows[..., column] = rows_at(x.expand(B, V, x.shape[-1]))
    made = {
        2: choice.keep, 3: choice.pools, 15: choice.source, 16: choice.order, 22: choice.sums,
        23: choice.born,
    }  # fmt: skip
    for column, x in made.items():
        if x is not None:
            rows[..., column] = rows_at(x)
    rows[..., 4:11] = (
        N, ask.gone, ask.sinks, ask.recent, ask.fp16_sinks, ask.fp16_recent, len(ask.counts),
    )  # fmt: skip
    rows[..., 11] = N - ask.gone if ask.room is None else ask.room
    rows[..., 12] = len(ask.counts) + 1 if ask.counts else ask.kinds
    rows[..., 24 : 24 + len(ask.counts[:-1])] = ask.counts[:-1]
    return rows.reshape(-1, COLUMNS)
