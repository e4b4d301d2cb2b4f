# mypy: ignore-errors
"""Attention of one query token over the parts of a head."""

import math

import numpy as np

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.places import slots_in_use, slots_of
from kvsearch_kernels.numba_loops.reading import ROWS, read
from kvsearch_kernels.numba_loops.rows import BLOCK, PAIRS, SIDE, SLOTS
from kvsearch_kernels.numba_loops.turning import turn_slots
from kvsearch_kernels.numba_loops.unpacking import hadamard
from kvsearch_kernels.numba_loops.weighing import products, softmax, weigh


@compiled()
def attend(q, parts, heads, turn, scale, softcap, plain, out, received):
    """Attention of one query token, see `packed_attention/reference.py`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        parts: what is held, a row of integers for each part.
        heads: KV heads.
        turn: how keys are turned.
        scale, softcap: see there; no softcap is 0.
        plain: turn every vector back, instead of the query and the sum of values.
        out: `[B, Hq, Dv]`, zeros.
        received: `[B, H, N]`, or of no size if nobody asks.
    """
    group, kind = q.shape[1] // heads, q.dtype.type
    wide, width = q.shape[2], out.shape[2]
    slots = slots_of(parts)
    s = np.empty((group, slots), q.dtype)
    rows = np.empty((ROWS, max(wide, width)), q.dtype)
    values = np.empty((ROWS, max(wide, width)), np.float32)
    query, turned = np.empty((group, wide), q.dtype), np.empty((group, wide), q.dtype)
    total = np.empty((group, width), q.dtype)
    for b in range(q.shape[0]):
        for h in range(heads):
            for g in range(group):
                asked = q[b, h * group + g]
                for d in range(wide):
                    query[g, d] = asked[d] * kind(scale)
                for i in range(slots):
                    s[g, i] = -np.inf
            first = 0
            for part in parts:
                side, asks = part[:SIDE], query
                whole = plain or turn[PAIRS] > 0
                if side[BLOCK] and not whole:
                    asks = turned
                    for g in range(group):
                        for d in range(wide):
                            turned[g, d] = query[g, d]
                        hadamard(turned[g], side[BLOCK])
                used = slots_in_use(part, b, h, heads)
                for start in range(0, used, ROWS):
                    count = min(ROWS, used - start)
                    read(side, b, h, start, count, whole, values, rows)
                    if turn[PAIRS]:
                        turn_slots(turn, b, h, first + start, count, rows)
                    products(asks, rows, count, s, first + start)
                if softcap > 0:  # of slots in use: the others stay at minus infinity
                    for g in range(group):
                        for i in range(first, first + used):
                            s[g, i] = kind(softcap) * math.tanh(s[g, i] / kind(softcap))
                first += part[SLOTS]
            for g in range(group):
                weight = softmax(s[g])
                inverse = kind(1) / weight if weight > 0 else kind(0)
                for i in range(slots):
                    s[g, i] *= inverse
            if received.size:
                for i in range(slots):
                    mean = kind(0)
                    for g in range(group):
                        mean += s[g, i]
                    received[b, h, i] = mean / kind(group)
            first = 0
            for part in parts:
                side = part[SIDE : 2 * SIDE]
                for g in range(group):
                    for d in range(width):
                        total[g, d] = 0
                used = slots_in_use(part, b, h, heads)
                for start in range(0, used, ROWS):
                    count = min(ROWS, used - start)
                    read(side, b, h, start, count, plain, values, rows)
                    weigh(s, first + start, rows, count, total)
                for g in range(group):
                    if side[BLOCK] and not plain:
                        hadamard(total[g], side[BLOCK])
                    given = out[b, h * group + g]
                    for d in range(width):
                        given[d] += total[g, d]
                first += part[SLOTS]
