# mypy: ignore-errors
"""Vectors of a pool, packed or not, as values."""

import numpy as np
from numba import carray

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import from_bits, from_half, pointer
from kvsearch_kernels.numba_loops.rows import (
    AT,
    BF16,
    BLOCK,
    FP16,
    KIND,
    PACKED,
    SCALE_B,
    SCALE_H,
    SCALES,
    SINGLE,
    STRIDE_B,
    STRIDE_H,
    STRIDE_N,
    WIDTH,
)
from kvsearch_kernels.numba_loops.unpacking import hadamard, unpack

ROWS = 32  # unpacked at once


@compiled()
def copy(kind, at, stride, count, width, out):
    """`count` vectors of a head that are not packed."""
    for t in range(count):
        row = out[t]
        if kind == FP16:
            halves = carray(pointer(at + t * stride), width, np.uint16)
            for i in range(width):
                row[i] = from_half(halves[i])
        elif kind == BF16:
            halves = carray(pointer(at + t * stride), width, np.uint16)
            for i in range(width):
                row[i] = from_bits(np.uint32(halves[i]) << np.uint32(16))
        elif kind == SINGLE:
            singles = carray(pointer(at + t * stride), width, np.float32)
            for i in range(width):
                row[i] = singles[i]
        else:
            doubles = carray(pointer(at + t * stride), width, np.float64)
            for i in range(width):
                row[i] = doubles[i]


@compiled()
def read(side, b, h, first, count, plain, values, out):
    """`count` vectors of one head to `out`; with `plain`, turned back if they were rotated.

    `values` is room for as many in fp32, in which vectors are turned back.
    """
    at = side[AT] + b * side[STRIDE_B] + h * side[STRIDE_H] + first * side[STRIDE_N]
    if side[KIND] != PACKED:
        copy(side[KIND], at, side[STRIDE_N], count, side[WIDTH], out)
        return
    scales = side[SCALES] + 2 * (b * side[SCALE_B] + h * side[SCALE_H])
    if not (plain and side[BLOCK]):
        unpack(side, at, scales, first, count, out)
        return
    unpack(side, at, scales, first, count, values)
    for t in range(count):
        hadamard(values[t, : side[WIDTH]], side[BLOCK])
        for i in range(side[WIDTH]):
            out[t, i] = values[t, i]


@compiled()
def dequantize(side, out):
    """Values of packed vectors fp32 `[B, H, N, D]`, turned back if they were rotated."""
    values = np.empty((ROWS, out.shape[3]), np.float32)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            for first in range(0, out.shape[2], ROWS):
                count = min(ROWS, out.shape[2] - first)
                read(side, b, h, first, count, True, values, out[b, h, first:])
