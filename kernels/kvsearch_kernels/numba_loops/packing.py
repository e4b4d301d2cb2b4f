# mypy: ignore-errors
"""Vectors as codes and scales."""

import numpy as np
from numba import float32

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import from_half, to_half
from kvsearch_kernels.numba_loops.reading import copy
from kvsearch_kernels.numba_loops.rows import AT, KIND, STRIDE_B, STRIDE_H, STRIDE_N
from kvsearch_kernels.numba_loops.unpacking import hadamard


@compiled()
def vectors(side, block, out):
    """Vectors in fp32, rotated in blocks if `block` is above 0, `[B, H, n, D]`."""
    batch, heads, n, width = out.shape
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                at = side[AT] + b * side[STRIDE_B] + h * side[STRIDE_H] + i * side[STRIDE_N]
                copy(side[KIND], at, 0, 1, width, out[b, h, i : i + 1])
                if block:
                    hadamard(out[b, h, i], block)


@compiled()
def quantize_uniform(x, bits, group, codes, scales):
    """Codes `[M, D]` uint8 and scales `[M, D / group, 2]` of rows fp32, see `Uniform.encode`."""
    top = float32((1 << bits) - 1)
    for m in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            row, mine = x[m, start : start + group], codes[m, start : start + group]
            low, high = row[0], row[0]
            for i in range(group):
                v = row[i]
                low, high = v if v < low or v != v else low, v if v > high or v != v else high
            numbers = scales[m, start // group]
            numbers[0], numbers[1] = to_half((high - low) / top), to_half(low)
            step, zero = from_half(numbers[0]), from_half(numbers[1])
            step = float32(1e-8) if step < float32(1e-8) else step
            for i in range(group):
                code = np.rint((row[i] - zero) / step)
                code = float32(0) if code < float32(0) or code != code else min(code, top)
                mine[i] = np.uint8(code)


@compiled()
def pack(codes, bits, packed):
    """Codes `[M, D]` uint8 to bytes `[M, D * bits / 8]`, see `reference._pack`."""
    width = codes.shape[1]
    low = bits - 1 if bits == 3 or bits == 5 else bits
    share, eighth, mask = width * low // 8, width // 8, np.uint8((1 << low) - 1)
    for m in range(codes.shape[0]):
        row, lower, upper = codes[m], packed[m, :share], packed[m, share:]
        packed[m] = 0
        for part in range(8 // low):
            plane, shift = row[part * share : (part + 1) * share], np.uint8(part * low)
            for i in range(share):
                lower[i] |= (plane[i] & mask) << shift
        if low != bits:
            for part in range(8):
                plane = row[part * eighth : (part + 1) * eighth]
                for i in range(eighth):
                    upper[i] |= (plane[i] >> np.uint8(low)) << np.uint8(part)
