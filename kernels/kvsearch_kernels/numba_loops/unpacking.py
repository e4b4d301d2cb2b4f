# mypy: ignore-errors
"""Packed vectors as values, and rotated ones."""

import numpy as np
from numba import carray, float32

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import from_half, pointer
from kvsearch_kernels.numba_loops.rows import (
    ALONG,
    BITS,
    EVEN,
    FIRST,
    GROUP,
    LEAD,
    NUMBERS,
    PIECE,
    SCALE_G,
    SCALE_N,
    STRIDE_N,
    TABLE,
    WIDTH,
)


@compiled()
def hadamard(x, block):
    """Rotate one vector fp32 or fp64 in place; the sums are those of `reference.hadamard`."""
    norm = x.dtype.type(block**-0.5)
    for start in range(0, x.shape[0], block):
        y = x[start : start + block]
        step = 1
        while step < block:
            for i in range(0, block, 2 * step):
                low, high = y[i : i + step], y[i + step : i + 2 * step]
                for k in range(step):
                    a, b = low[k], high[k]
                    low[k], high[k] = a + b, a - b
            step *= 2
        for k in range(block):
            y[k] *= norm


@compiled()
def _unpack_whole(side, codes_at, scales_at, first, count, out):
    """`_unpack_planes` of 8 or 4 bits with one scale a vector, in a third of its time.

    Both planes come at once. At 2 bits the same, with four planes, was slower.
    """
    bits, even, numbers, stride = side[BITS], side[EVEN], side[NUMBERS], side[STRIDE_N]
    scales, share = scales_at + 2 * first * side[SCALE_N], side[WIDTH] * bits // 8
    lowest, levels = float32(side[FIRST]), carray(pointer(side[TABLE]), 256, np.float32)
    scale_stride = 2 * side[SCALE_N]
    nibble, four = np.uint8(15), np.uint8(4)
    for t in range(count):
        number = carray(pointer(scales + t * scale_stride), 2, np.uint16)
        step = from_half(number[0]) if numbers else float32(1)
        zero = from_half(number[1]) if numbers == 2 else float32(-0.0)  # changes nothing
        byte, row = carray(pointer(codes_at + t * stride), share, np.uint8), out[t]
        if even and bits == 8:
            for i in range(share):
                row[i] = (float32(byte[i]) + lowest) * step + zero
        elif even and bits == 4:
            for i in range(share):
                row[i] = (float32(byte[i] & nibble) + lowest) * step + zero
                row[share + i] = (float32(byte[i] >> four) + lowest) * step + zero
        elif bits == 8:
            for i in range(share):
                row[i] = levels[byte[i]] * step + zero
        else:
            for i in range(share):
                row[i] = levels[byte[i] & nibble] * step + zero
                row[share + i] = levels[byte[i] >> four] * step + zero


@compiled()
def _unpack_planes(side, codes_at, scales_at, first, count, out):
    """`unpack` of 8, 4, 2 or 1 bits, piece by piece.

    A piece is channels that share a plane of the codes and a scale. Loops over vectors are in here,
    since calls with slices of arrays cost more than what they would do.
    """
    width, bits, group, piece = side[WIDTH], side[BITS], side[GROUP], side[PIECE]
    even, numbers = side[EVEN], side[NUMBERS]
    stride, scale_stride, group_stride = side[STRIDE_N], 2 * side[SCALE_N], 2 * side[SCALE_G]
    share, mask, lowest = width * bits // 8, np.uint8((1 << bits) - 1), float32(side[FIRST])
    levels = carray(pointer(side[TABLE]), 256, np.float32)
    for start in range(0, width, piece):
        shift = np.uint8(start // share * bits)
        codes, scales = codes_at + start % share, scales_at + start // group * group_stride
        for t in range(count):
            pair = carray(pointer(scales + (first + t) * scale_stride), 2, np.uint16)
            step = from_half(pair[0]) if numbers else float32(1)
            zero = from_half(pair[1]) if numbers == 2 else float32(-0.0)  # changes nothing
            part = out[t, start : start + piece]
            lower = carray(pointer(codes + t * stride), piece, np.uint8)
            if even:
                for i in range(piece):
                    part[i] = (float32((lower[i] >> shift) & mask) + lowest) * step + zero
            else:
                for i in range(piece):
                    part[i] = levels[(lower[i] >> shift) & mask] * step + zero


@compiled()
def _unpack_split(side, codes_at, scales_at, first, count, out):
    """`unpack` of 5 and 3 bits, whose highest bits lie apart: codes first, then their levels."""
    width, bits, group = side[WIDTH], side[BITS], side[GROUP]
    even, along, numbers, lead = side[EVEN], side[ALONG], side[NUMBERS], side[LEAD] + first
    low = bits - 1
    share, eighth = width * low // 8, width // 8
    mask, up, one = np.uint8((1 << low) - 1), np.uint8(low), np.uint8(1)
    lowest, levels = float32(side[FIRST]), carray(pointer(side[TABLE]), 256, np.float32)
    codes = np.empty(width, np.uint8)
    for t in range(count):
        at = codes_at + t * side[STRIDE_N]
        lower = carray(pointer(at), share, np.uint8)
        for p in range(8 // low):
            shift, plane = np.uint8(p * low), codes[p * share : (p + 1) * share]
            for i in range(share):
                plane[i] = (lower[i] >> shift) & mask
        upper = carray(pointer(at + share), eighth, np.uint8)
        for p in range(8):
            shift, plane = np.uint8(p), codes[p * eighth : (p + 1) * eighth]
            for i in range(eighth):
                plane[i] |= ((upper[i] >> shift) & one) << up
        row = (lead + t) // along if along else first + t
        for start in range(0, width, group):
            number = scales_at + 2 * (row * side[SCALE_N] + start // group * side[SCALE_G])
            pair = carray(pointer(number), 2, np.uint16)
            step = from_half(pair[0]) if numbers else float32(1)
            zero = from_half(pair[1]) if numbers == 2 else float32(-0.0)  # changes nothing
            mine, values = codes[start : start + group], out[t, start : start + group]
            if even:
                for i in range(group):
                    values[i] = (float32(mine[i]) + lowest) * step + zero
            else:
                for i in range(group):
                    values[i] = levels[mine[i]] * step + zero


@compiled()
def _unpack_along(side, codes_at, scales_at, first, count, out):
    """`unpack` of 8, 4, 2 or 1 bits in groups along tokens: scales are read once a group."""
    width, bits, numbers, apart = side[WIDTH], side[BITS], side[NUMBERS], side[SCALE_G]
    share, mask, lowest = width * bits // 8, np.uint8((1 << bits) - 1), float32(side[FIRST])
    levels = carray(pointer(side[TABLE]), 256, np.float32)
    steps, zeros = np.ones(width, np.float32), np.full(width, float32(-0.0))
    held = -1
    for t in range(count):
        row = (side[LEAD] + first + t) // side[ALONG]
        if row != held and numbers:
            at = scales_at + 2 * row * side[SCALE_N]
            every = carray(pointer(at), (width - 1) * apart + numbers, np.uint16)
            for i in range(width):
                steps[i] = from_half(every[i * apart])
            if numbers == 2:
                for i in range(width):
                    zeros[i] = from_half(every[i * apart + 1])
        held = row
        byte = carray(pointer(codes_at + t * side[STRIDE_N]), share, np.uint8)
        for start in range(0, width, share):
            shift, part = np.uint8(start // share * bits), out[t, start : start + share]
            step, zero = steps[start : start + share], zeros[start : start + share]
            if side[EVEN]:
                for i in range(share):
                    part[i] = (float32((byte[i] >> shift) & mask) + lowest) * step[i] + zero[i]
            else:
                for i in range(share):
                    part[i] = levels[(byte[i] >> shift) & mask] * step[i] + zero[i]


@compiled()
def unpack(side, codes_at, scales_at, first, count, out):
    """`count` packed vectors of a head to values."""
    if side[BITS] == 5 or side[BITS] == 3:
        _unpack_split(side, codes_at, scales_at, first, count, out)
    elif side[ALONG]:
        _unpack_along(side, codes_at, scales_at, first, count, out)
    elif side[GROUP] == side[WIDTH] and side[BITS] >= 4:
        _unpack_whole(side, codes_at, scales_at, first, count, out)
    else:
        _unpack_planes(side, codes_at, scales_at, first, count, out)
