"""Triton implementation of `copy_rows`: one launch for all tensors.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows
from kvsearch_kernels.configs import COPY_BYTES, COPY_WARPS
from kvsearch_kernels.copy_rows.reference import Copy
from kvsearch_kernels.launch import FUSED, ceil_div, emulated, on, why_not_here
from kvsearch_kernels.sending import sent

__all__ = ["emulated", "forward", "why_not"]

MOST_RUNS = 65535  # a grid's second axis
PIECE = 64 * COPY_BYTES  # a run is cut into rows of so many bytes: a grid is as wide as the longest
FILL = 3  # the kind of a row that repeats a number, see `_rows`
UNITS = (16, 4, 1)  # bytes that are copied at once, for the other kinds


def why_not(copies: Sequence[Copy]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    tensors = [x for copy in copies for x in (copy.to, copy.of) if not isinstance(x, int)]
    if reason := why_not_here(*tensors):
        return reason
    if reason := next(filter(None, map(_why_not, copies)), None):
        return reason
    runs = sum(map(_count, copies))
    return None if runs <= MOST_RUNS else f"there may be {MOST_RUNS} runs of bytes, got {runs}"


def _count(copy: Copy) -> int:
    """Rows of its table."""
    run = max(1, _run(copy)[1])
    return copy.to.numel() // run * ceil_div(run * copy.to.element_size(), PIECE)


def _why_not(copy: Copy) -> str | None:
    """Reason why this one cannot be made, or None."""
    to, of = copy.to, copy.of
    if isinstance(of, int):
        return None if to.dtype is torch.int32 else f"a number must be int32, got {to.dtype}"
    if to.shape == of.shape and to.dtype is of.dtype:
        return None
    return (
        f"copies must be of one shape and type, got {tuple(of.shape)} {of.dtype} "
        f"for {tuple(to.shape)} {to.dtype}"
    )


def forward(copies: Sequence[Copy]) -> None:
    """As `reference`."""
    from kvsearch_kernels.copy_rows.triton_kernels import copy_all

    rows = [_rows(copy) for copy in copies if copy.to.numel()]
    if not rows:
        return
    table, device = np.concatenate(rows), copies[0].to.device
    most = int(table[:, 2].max())
    with on(device):
        copy_all[(ceil_div(most, COPY_BYTES), len(table))](
            sent(table, device), BYTES=COPY_BYTES, **FUSED, num_warps=COPY_WARPS
        )


def _run(copy: Copy) -> tuple[int, int]:
    """Axes before those that follow one another without a gap in both, and elements of these."""
    sides = [x for x in (copy.to, copy.of) if isinstance(x, Tensor)]
    run, axes = 1, copy.to.dim()
    for size in reversed(copy.to.shape):
        if size != 1 and any(x.stride(axes - 1) != run for x in sides):
            break
        run, axes = run * size, axes - 1
    return axes, run


def _rows(copy: Copy) -> Rows:
    """Rows of the table for the runs of bytes of one tensor.

    0 where to copy from, or the number, 1 where to, both in bytes, 2 bytes, 3 which of the `UNITS`
    divides all of these, or `FILL`.
    """
    axes, run = _run(copy)
    to, size = _starts(copy.to, axes), run * copy.to.element_size()
    rows = np.zeros((len(to), 4), np.int64)
    rows[:, 1], rows[:, 2], rows[:, 3] = to, size, FILL
    if isinstance(copy.of, int):
        rows[:, 0] = copy.of
    else:
        rows[:, 0] = _starts(copy.of, axes)
        rows[:, 3] = next(i for i, unit in enumerate(UNITS) if not (rows[:, :3] % unit).any())
    return rows if size <= PIECE else _cut(rows, size)


def _cut(rows: Rows, size: int) -> Rows:
    """Rows of runs of `size` bytes as rows of PIECE bytes, which all `UNITS` divide, and rests."""
    count = ceil_div(size, PIECE)
    first = np.arange(count, dtype=np.int64) * PIECE
    cut = np.repeat(rows[:, None], count, 1)
    cut[:, :, 0] += np.where(cut[:, :, 3] == FILL, 0, first)
    cut[:, :, 1] += first
    cut[:, :, 2] = np.minimum(PIECE, size - first)
    return cut.reshape(-1, rows.shape[1])


def _starts(x: Tensor, axes: int) -> Rows:
    """Addresses in bytes of what the first `axes` axes of `x` number."""
    at = np.zeros(x.shape[:axes], np.int64)
    for axis in range(axes):
        step = np.arange(x.shape[axis], dtype=np.int64) * (x.stride(axis) * x.element_size())
        at += step.reshape(-1, *[1] * (axes - axis - 1))
    return x.data_ptr() + at.reshape(-1)
