# mypy: ignore-errors
"""A token from the pool into its tier, in place of the slot of lowest rank where that is full."""

import numpy as np
from numba import carray

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import pointer
from kvsearch_kernels.numba_loops.packing import pack, quantize_uniform, vectors
from kvsearch_kernels.numba_loops.rows import (
    AT,
    BITS,
    BLOCK,
    BORN,
    BORN_B,
    BORN_V,
    COUNT,
    DIVISORS,
    FORGETS,
    GROUP,
    KIND,
    LENGTHS,
    PACKED,
    RECENT,
    SCALE_B,
    SCALE_H,
    SCALE_N,
    SCALES,
    SIDE,
    SINKS,
    STRIDE_B,
    STRIDE_H,
    STRIDE_N,
    TARGET,
    WIDTH,
)


@compiled()
def _lowest(sums, ages, first, last, divisors):
    """The slot of lowest rank among `first` to `last`, of equals the oldest."""
    place, least = first, np.float32(np.inf)
    for i in range(first, last):
        rank = sums[i]
        if divisors.size:
            rank /= divisors[ages[-1] + 1 - ages[i]]
        if rank < least:
            place, least = i, rank
    return place


@compiled()
def _shift(x, first, last, size):
    """Rows of `size` numbers one to the front, over row `first`, up to row `last`."""
    for i in range(first * size, (last - 1) * size):
        x[i] = x[i + size]


@compiled()
def _join(side, pool, b, h, places, n):
    """Put the pool's first vector behind a head's `n` slots, or over the slot that leaves.

    Args:
        side: keys or values of the tier.
        pool: the same of the pool.
        b, h: which head.
        places: of each voter the slot that leaves, n + 1 where none does; and heads of a voter.
        n: slots in use.
    """
    place, width = places[0][b, h // places[1]], side[WIDTH]
    if place == n:  # the token itself leaves
        return
    size, last = side[STRIDE_N], n if place < n else n + 1
    where = side[AT] + b * side[STRIDE_B] + h * side[STRIDE_H]
    rows = carray(pointer(where), last * size, np.uint8)
    if place < n:
        _shift(rows, place, n, size)
    row = rows[(last - 1) * size : last * size]
    if side[KIND] != PACKED:
        at = pool[AT] + b * pool[STRIDE_B] + h * pool[STRIDE_H]
        row[:] = carray(pointer(at), size, np.uint8)
        return
    one = pool.copy()
    one[AT] += b * pool[STRIDE_B] + h * pool[STRIDE_H]
    x = np.empty((1, 1, 1, width), np.float32)
    vectors(one, side[BLOCK], x)
    numbers = width // side[GROUP]
    codes, scales = np.empty((1, width), np.uint8), np.empty((1, numbers, 2), np.uint16)
    quantize_uniform(x[0, 0], side[BITS], side[GROUP], codes, scales)
    pack(codes, side[BITS], row.reshape(1, size))
    where = side[SCALES] + 2 * (b * side[SCALE_B] + h * side[SCALE_H])
    held = carray(pointer(where), last * side[SCALE_N], np.uint16)
    if place < n:
        _shift(held, place, n, side[SCALE_N])
    held[(last - 1) * side[SCALE_N] : last * side[SCALE_N]] = scales.reshape(2 * numbers)


@compiled()
def enter(parts, row, how, batch):
    """The token in the pool of some heads into their tier, see `decode_step.entering`.

    Args:
        parts: rows of integers of the tier and of the pool.
        row: of the heads.
        how: integers of where the token goes.
        batch: sequences.
    """
    tier, pool, heads = parts[0], parts[1], row[2]
    count = carray(pointer(how[COUNT]), 1, np.int64)
    n, voters = count[0], max(1, row[6])
    full, none = n >= how[TARGET], np.empty(0, np.float32)
    places = np.empty((batch, voters), np.int64)
    left = n if full else n + 1
    for b in range(batch):
        for v in range(voters):
            place = how[SINKS] if full else n + 1
            if row[3]:
                at = row[3] + 4 * (b * row[4] + v * row[5])
                sums = carray(pointer(at), left + 1, np.float32)
                ages, divisors = np.empty(0, np.int32), none
                if how[BORN]:
                    at = how[BORN] + 4 * (b * how[BORN_B] + v * how[BORN_V])
                    ages = carray(pointer(at), n + 1, np.int32)
                    if how[DIVISORS]:
                        divisors = carray(pointer(how[DIVISORS]), ages[n] + 2, np.float32)
                if full:
                    place = _lowest(sums, ages, place, n + 1 - how[RECENT], divisors)
                    _shift(sums, place, n + 1, 1)
                if how[FORGETS]:
                    sums[:] = 0
                sums[left] = 0
                if how[BORN] and full:
                    newest = ages[n]
                    _shift(ages, place, n + 1, 1)
                    ages[n] = newest + 1
            places[b, v] = place
        for h in range(heads):
            _join(tier[:SIDE], pool[:SIDE], b, h, (places, heads // voters), n)
            _join(tier[SIDE:], pool[SIDE:], b, h, (places, heads // voters), n)
    count[0] = left
    lengths = carray(pointer(pool[LENGTHS]), batch * heads, np.int32)
    lengths[:] = 0
