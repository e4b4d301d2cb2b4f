# mypy: ignore-errors
"""One token in all heads of a layer: stored, attended and tallied."""

import numpy as np
from numba import carray, float32

from kvsearch_kernels.numba_loops.attending import attend
from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.entering import enter
from kvsearch_kernels.numba_loops.memory import pointer, to_half
from kvsearch_kernels.numba_loops.places import slot, slots_of
from kvsearch_kernels.numba_loops.rows import (
    AT,
    COUNT,
    ENTERS,
    HEADS,
    LENGTHS,
    SIDE,
    SLOTS,
    STRIDE_B,
    STRIDE_H,
    STRIDE_N,
)


@compiled()
def _store(new, pool, token, first, heads):
    """Put a token's vectors at its slot of each head, in one side of a pool."""
    size = new.shape[3]
    for b in range(new.shape[0]):
        for h in range(heads):
            at = pool[AT] + b * pool[STRIDE_B] + h * pool[STRIDE_H] + token[b, h] * pool[STRIDE_N]
            row, mine = carray(pointer(at), size, np.uint8), new[b, first + h, 0]
            for i in range(size):
                row[i] = mine[i]


@compiled()
def _tally(received, row, alpha, keep, used):
    """Add what slots received to a rule's sums, see `decode_step/tally.py`."""
    sums_at, of_batch, of_voter, voters, count = row[3], row[4], row[5], row[6], row[7]
    order, held, end, horizon = (row[8], row[9], row[10], row[11]), row[12], row[13], row[14]
    batch, heads, _ = received.shape
    weight = float32(1)
    if alpha != 0 or horizon < 1 << 62:
        weight = float32(float32(used + held) ** alpha) if end - used < horizon else float32(0)
    each = heads // voters
    for b in range(batch):
        for w in range(voters):
            sums = carray(pointer(sums_at + 4 * (b * of_batch + w * of_voter)), count, np.float32)
            for i in range(count):
                at, total = slot(order, b, w, i), float32(0)
                for h in range(w * each, (w + 1) * each):
                    total += received[b, h, at]
                sums[i] = sums[i] * keep + total * weight / float32(each)


@compiled()
def step(q, k, v, parts, rows, numbers, scale, softcap, plain, out):
    """One token in all heads of a layer, see `decode_step.reference`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        k, v: keys and values of the token `[B, H, 1, bytes]`, in the type of the pools.
        parts: what is held, a row of integers for each part.
        rows: of heads that are alike: their parts, how many they are, their rule's sums, how
            keys are turned (then `k` and `q` come from `arrive`), and where the token enters.
        numbers: of each of `rows`: the power of the slots seen, and the factor on the sums.
        scale, softcap, plain: as in `attend`.
        out: `[B, Hq, Dv]`.
    """
    batch, group, first = q.shape[0], q.shape[1] // k.shape[1], 0
    for r in range(rows.shape[0]):
        row = rows[r]
        mine, heads, how = parts[row[0] : row[1]], row[2], row[ENTERS:]
        if how[COUNT]:
            mine, row, n = mine.copy(), row.copy(), carray(pointer(how[COUNT]), 1, np.int64)[0]
            mine[0, SLOTS], row[7], row[12] = n, n + 1, n
        pool = mine[-1]
        lengths = carray(pointer(pool[LENGTHS]), (batch, heads), np.int32)
        most = 0
        for b in range(batch):
            for h in range(heads):
                most = max(most, lengths[b, h])
        if most < pool[SLOTS]:
            _store(k, pool[:SIDE], lengths, first, heads)
            _store(v, pool[SIDE : 2 * SIDE], lengths, first, heads)
        query = np.empty((batch, heads * group, q.shape[2]), q.dtype)
        mean = np.empty((batch, heads * group, out.shape[2]), q.dtype)
        for b in range(batch):
            for h in range(heads):
                lengths[b, h] += 1
            for g in range(heads * group):
                for d in range(q.shape[2]):
                    query[b, g, d] = q[b, first * group + g, d]
                for d in range(out.shape[2]):
                    mean[b, g, d] = 0
        received = np.empty((batch, heads, slots_of(mine) if row[3] else 0), q.dtype)
        attend(query, mine, heads, row[HEADS:], scale, softcap, plain, mean, received)
        for b in range(batch):
            for g in range(heads * group):
                for d in range(out.shape[2]):
                    out[b, first * group + g, d] = mean[b, g, d]
        if row[3]:
            _tally(received, row, numbers[r, 0], float32(numbers[r, 1]), lengths[0, 0])
        if how[COUNT]:
            enter(mine, row, how, batch)
        first += heads


@compiled()
def _halves(x):
    """Vectors `[B, H, D]` fp32, rounded to fp16, as bytes `[B, H, 1, 2 D]`."""
    found = np.empty((x.shape[0], x.shape[1], 1, x.shape[2]), np.uint16)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(x.shape[2]):
                found[b, h, 0, d] = to_half(x[b, h, d])
    return found.view(np.uint8)


@compiled()
def step_at(q, k, v, out, shape, parts, rows, numbers, scale, softcap):
    """`step` of fp32 numbers at addresses, for pools in fp16: what is asked for each token.

    Arrays would cost the host more than this, where little else is in its caches.

    Args:
        q, k, v, out: addresses of queries, of the token's keys and values, and of the output.
        shape: `(B, H, queries of a KV head, D, Dv)`.
        parts, rows, numbers, scale, softcap: as in `step`.
    """
    batch, heads, group, wide, width = shape
    step(
        carray(pointer(q), (batch, heads * group, wide), np.float32),
        _halves(carray(pointer(k), (batch, heads, wide), np.float32)),
        _halves(carray(pointer(v), (batch, heads, width), np.float32)),
        parts, rows, numbers, scale, softcap, False,
        carray(pointer(out), (batch, heads * group, width), np.float32),
    )  # fmt: skip
