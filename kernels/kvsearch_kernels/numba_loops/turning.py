# mypy: ignore-errors
"""Keys and queries turned by the angles of positions."""

import numpy as np
from numba import carray

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import pointer
from kvsearch_kernels.numba_loops.places import slot, slots_in_use
from kvsearch_kernels.numba_loops.rows import ANGLES, BEFORE, FINE, HEADS, INDEX, PAIRS


@compiled()
def _turn(row, pairs, cos, sin):
    """Turn channels i and `pairs` + i of a vector by an angle each, in place."""
    kind = row.dtype.type
    low, high = row[:pairs], row[pairs : 2 * pairs]
    for i in range(pairs):
        a, b, c, s = low[i], high[i], kind(cos[i]), kind(sin[i])
        low[i], high[i] = a * c - b * s, b * c + a * s


@compiled()
def _angles(turn, position, cos, sin):
    """Cosines and sines fp64 of the angles of a position."""
    pairs = turn[PAIRS]
    size, fine, more = 16 * pairs, position % FINE, FINE + position // FINE
    low = carray(pointer(turn[ANGLES] + fine * size), (2, pairs), np.float64)
    high = carray(pointer(turn[ANGLES] + more * size), (2, pairs), np.float64)
    for i in range(pairs):
        cos[i] = low[0, i] * high[0, i] - low[1, i] * high[1, i]
        sin[i] = low[1, i] * high[0, i] + low[0, i] * high[1, i]


@compiled()
def turn_slots(turn, b, h, first, count, rows):
    """Turn the keys of slots `first`, ... of a head to their index."""
    cos, sin = np.empty(turn[PAIRS], np.float64), np.empty(turn[PAIRS], np.float64)
    where = (turn[INDEX], turn[INDEX + 1], turn[INDEX + 2], turn[INDEX + 3])
    for t in range(count):
        _angles(turn, slot(where, b, h, first + t), cos, sin)
        _turn(rows[t], turn[PAIRS], cos, sin)


@compiled()
def arrive(q, k, waves, parts, rows):
    """Keys to no angle and queries to that of their slot, in place, see `turned.arrived`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        k: keys `[B, H, D]`, likewise.
        waves: cosines and sines fp64 that take back the model's angle, of queries and of keys
            `[B, H, 2, 2, R / 2]`.
        parts, rows: as in `step`.
    """
    batch, group, first = q.shape[0], q.shape[1] // k.shape[1], 0
    for r in range(rows.shape[0]):
        row, turn = rows[r], rows[r, HEADS:]
        pairs, heads, pool = turn[PAIRS], row[2], parts[row[1] - 1]
        cos, sin = np.empty(pairs, np.float64), np.empty(pairs, np.float64)
        for b in range(batch):
            for h in range(heads):
                mine = waves[b, first + h]
                _turn(k[b, first + h], pairs, mine[1, 0], mine[1, 1])
                _angles(turn, turn[BEFORE] + slots_in_use(pool, b, h, heads), cos, sin)
                for g in range((first + h) * group, (first + h + 1) * group):
                    _turn(q[b, g], pairs, mine[0, 0], mine[0, 1])
                    _turn(q[b, g], pairs, cos, sin)
        first += heads
