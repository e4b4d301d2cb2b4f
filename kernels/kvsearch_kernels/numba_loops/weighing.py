# mypy: ignore-errors
"""Products, softmax and weighted sums of one query token."""

import math

import numpy as np
from numba import float32, types
from numba.extending import overload

from kvsearch_kernels.numba_loops.compiled import LOOSE, compiled
from kvsearch_kernels.numba_loops.memory import from_bits

LANES = 16  # numbers that are compared side by side


@compiled()
def _exp_single(x):
    """`exp` of fp32 up to 0, to 2 units in the last place; Cephes' polynomial, as vectors can."""
    n = np.floor(x * float32(1.44269504088896341) + float32(0.5))
    r = x - n * float32(0.693359375)
    r = r - n * float32(-2.12194440e-4)
    y = float32(1.9875691500e-4)
    y = y * r + float32(1.3981999507e-3)
    y = y * r + float32(8.3334519073e-3)
    y = y * r + float32(4.1665795894e-2)
    y = y * r + float32(1.6666665459e-1)
    y = y * r + float32(5.0000001201e-1)
    y = y * r * r + r + float32(1)
    power = np.int32(max(n, float32(-126))) + np.int32(127)
    y *= from_bits(np.uint32(power) << np.uint32(23))
    return y if x > float32(-87) else float32(0) if x == x else x


def _exp(x):
    return math.exp(x)


@overload(_exp)
def _exp_of(x):
    return _single if x == types.float32 else lambda x: math.exp(x)


def _single(x):
    return _exp_single(x)


@compiled(LOOSE)
def products(q, keys, count, s, first):
    """Products `s[:, first : first + count]` of queries `[G, D]` and the first keys."""
    for t in range(count):
        key = keys[t]
        for g in range(q.shape[0]):
            query, total = q[g], q.dtype.type(0)
            for d in range(query.shape[0]):
                total += query[d] * key[d]
            s[g, first + t] = total


@compiled(LOOSE)
def weigh(p, first, values, count, out):
    """Add weights `p[:, first : first + count]` times the first values to `out` `[G, D]`."""
    width, whole = out.shape[1], count // 4 * 4
    for g in range(out.shape[0]):
        total, weights = out[g], p[g, first : first + count]
        for t in range(0, whole, 4):  # so that a sum is read and written once for four values
            a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
            one, two, three, four = values[t], values[t + 1], values[t + 2], values[t + 3]
            for i in range(width):
                total[i] += (a * one[i] + b * two[i]) + (c * three[i] + d * four[i])
        for t in range(whole, count):
            weight, value = weights[t], values[t]
            for i in range(width):
                total[i] += weight * value[i]


@compiled()
def _largest(s):
    """The largest number of `s`, lane by lane, which vectors can."""
    lanes = np.full(LANES, -np.inf, s.dtype)
    whole = s.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        part = s[i : i + LANES]
        for k in range(LANES):
            lanes[k] = part[k] if part[k] > lanes[k] else lanes[k]
    for i in range(whole, s.shape[0]):
        lanes[0] = max(lanes[0], s[i])
    return lanes.max()


@compiled(LOOSE)
def softmax(s):
    """Products of one query to weights, in place; returns the sum of weights."""
    largest, total = _largest(s), s.dtype.type(0)
    if largest == -np.inf:
        s[:] = 0
        return total
    for i in range(s.shape[0]):
        s[i] = _exp(s[i] - largest)
        total += s[i]
    return total
