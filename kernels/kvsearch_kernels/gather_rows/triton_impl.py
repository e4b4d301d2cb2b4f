"""Triton implementation of `gather_rows`: one launch for rows of all tensors.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels import addresses
from kvsearch_kernels.addresses import readable, rows_at
from kvsearch_kernels.configs import GATHER_ROWS, GATHER_WARPS
from kvsearch_kernels.gather_rows.reference import Rows
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    check_slots,
    emulated,
    on,
    rows_last,
    why_not_here,
    why_not_slots,
)
from kvsearch_kernels.sending import sent

__all__ = ["emulated", "forward", "why_not"]

MOST_PARTS = 4
MOST_TENSORS = 65535  # heads of all of them: a grid's second axis
HEAD, PART = 6, 3  # columns before those of parts, and of each of these
COLUMNS = HEAD + MOST_PARTS * PART
UNITS = (16, 2, 1)  # bytes that are copied at once; a row has a whole number of them


def why_not(asked: Sequence[Rows]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(*(x.source for x in asked)):
        return reason
    if reason := next(filter(None, map(_why_not, asked)), None):
        return reason
    heads = sum(x.parts[0].shape[:2].numel() for x in asked)
    if heads > MOST_TENSORS:
        return f"batch x KV heads of all tensors must be at most {MOST_TENSORS}, got {heads}"
    return None


def _why_not(asked: Rows) -> str | None:
    """Reason why these rows cannot be copied, or None."""
    if not 1 <= len(asked.parts) <= MOST_PARTS:
        return f"there must be 1 to {MOST_PARTS} parts, got {len(asked.parts)}"
    first = asked.parts[0]
    if reason := why_not_here(asked.source, *asked.parts):
        return reason
    for x in asked.parts:
        if x.dim() != 4:
            return f"parts must have 4 axes, one has shape {tuple(x.shape)}"
        if x.dtype is not first.dtype or (*x.shape[:2], x.shape[3]) != (
            *first.shape[:2], first.shape[3],
        ):  # fmt: skip
            return f"parts must be alike but for their rows, got {_named(first)} and {_named(x)}"
    if asked.source.dtype is not torch.int64:
        return f"source must be int64, got {asked.source.dtype}"
    return why_not_slots(first, asked.source)


def _named(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"


def forward(asked: Sequence[Rows]) -> list[Tensor]:
    """As `reference`."""
    from kvsearch_kernels.gather_rows.triton_kernels import gather_all

    made: list[Tensor] = []
    kept: list[Tensor] = []  # copies whose addresses are in the table, until the launch
    rows: list[addresses.Rows] = []
    for x in asked:
        first, n = x.parts[0], x.source.shape[-1]
        check_slots(x.source, sum(part.shape[2] for part in x.parts))
        made.append(first.new_empty(*first.shape[:2], n, first.shape[3]))
        if made[-1].numel():
            rows.append(_rows(x, made[-1], kept))
    if not rows:
        return made
    table, device = np.concatenate(rows), made[0].device
    most = int(table[:, 1].max())
    with on(device):
        gather_all[(ceil_div(most, GATHER_ROWS), len(table))](
            sent(table, device), BT=GATHER_ROWS, **FUSED, num_warps=GATHER_WARPS
        )
    return made


def _rows(asked: Rows, out: Tensor, kept: list[Tensor]) -> addresses.Rows:
    """Rows of the table for the heads of a tensor `[B * H, COLUMNS]`.

    0 source, 1 rows of the result, 2 the result, 3 units of a row, 4 which of the `UNITS`, 5 parts;
    then for each part 0 its rows, 1 number of the first, 2 how many. Addresses are in bytes, and
    what they point to must be `kept` until the launch.
    """
    B, H, n, wide = out.shape
    rows = np.zeros((B, H, COLUMNS), np.int64)
    source, size = rows_last(asked.source), wide * out.element_size()
    parts = [readable(x) for x in asked.parts]
    kept += [source, *parts]
    unit = next(i for i, of in enumerate(UNITS) if size % of == 0)
    rows[..., 0] = rows_at(source.expand(B, H, n))
    rows[..., 1], rows[..., 2] = n, rows_at(out)
    rows[..., 3:6] = size // UNITS[unit], unit, len(parts)
    start = 0
    for i, x in enumerate(parts):
        at = HEAD + PART * i
        rows[..., at], rows[..., at + 1], rows[..., at + 2] = rows_at(x), start, x.shape[2]
        start += x.shape[2]
    return rows.reshape(-1, COLUMNS)
