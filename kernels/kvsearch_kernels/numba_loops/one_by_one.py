# mypy: ignore-errors
"""Tokens into a full cache, one in place of another."""

import math

import numpy as np

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.weighing import products, softmax, weigh


@compiled()
def _lowest(sums, born, first, last, seen, recent, divisors):
    """The slot of lowest rank among `first` to `last`, of equals the oldest."""
    place, least = -1, np.float32(np.inf)
    for i in range(first, last):
        if recent and born[i] >= seen - recent:
            continue
        rank = sums[i]
        if divisors.size:
            rank /= divisors[seen - born[i]]
        if place < 0 or rank < least or (rank == least and born[i] < born[place]):
            place, least = i, rank
    return place


@compiled()
def one_by_one(q, new, kept, slots, sums, born, numbers, weight, carry, divisors, softcap, out):
    """Tokens into a full cache, each in place of the slot of lowest rank; see `evict_in_place`.

    Args:
        q: queries `[J, H, G, D]`, scaled.
        new, kept: keys and values as they come, and as their tier keeps them `[J, 2, H, D]`.
        slots: keys and values `[2, H, n + 1, D]`; the last slot is the newest token's.
        sums, born: of slots, of each voter `[V, n + 1]`, fp32 and int64; written to.
        numbers: tokens seen; first and last candidate; recent window that is none, or 0; whether
            sums are forgotten at every token.
        weight: of what a slot receives from one query head.
        carry: what is left of a sum after a token.
        divisors: of sums, by age, fp32; empty if ranks are sums.
        softcap: of products, or 0.
        out: outputs `[J, H, G, D]`, zeros.
    """
    seen, first, last, recent, forgets = numbers
    heads, group, kind, n = q.shape[1], q.shape[2], q.dtype.type, sums.shape[1] - 1
    share = heads // sums.shape[0]
    s, votes = np.empty((group, n + 1), q.dtype), np.empty(n + 1, q.dtype)
    for j in range(q.shape[0]):
        born[:, n] = seen
        seen += 1
        for v in range(sums.shape[0]):
            votes[:] = 0
            for h in range(v * share, (v + 1) * share):
                slots[0, h, n], slots[1, h, n] = new[j, 0, h], new[j, 1, h]
                products(q[j, h], slots[0, h], n + 1, s, 0)
                for g in range(group):
                    row = s[g]
                    if softcap > 0:
                        for i in range(n + 1):
                            row[i] = kind(softcap) * math.tanh(row[i] / kind(softcap))
                    total = softmax(row)
                    inverse = kind(1) / total
                    for i in range(n + 1):
                        row[i] *= inverse
                        votes[i] += row[i]
                weigh(s, 0, slots[1, h], n + 1, out[j, h])
            mine, ages = sums[v], born[v]
            for i in range(n + 1):
                mine[i] = mine[i] * np.float32(carry) + np.float32(kind(weight) * votes[i])
            place = _lowest(mine, ages, first, last, seen, recent, divisors)
            if place < n:
                for h in range(v * share, (v + 1) * share):
                    slots[0, h, place], slots[1, h, place] = kept[j, 0, h], kept[j, 1, h]
                ages[place] = ages[n]
                if not forgets:
                    mine[place] = mine[n]
            mine[n] = 0
