# mypy: ignore-errors
"""Who stays at a compaction, in which pool, and pools in order of time."""

import numpy as np

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import bits_of

PLACED, SPOILT = -(1 << 63), 1 << 62  # orders of slots, see `choose_slots.reference`


@compiled()
def _rising(scores, first, last, newest_first, keys):
    """Integers that rise with `scores[first:last]`; the slot decides between equals."""
    for i in range(last - first):
        positive = np.float32(scores[first + i] + np.float32(0))  # -0.0 + 0.0 is 0.0
        bits = np.int64(np.int32(bits_of(positive)))
        bits = bits if bits >= 0 else bits ^ 0x7FFFFFFF
        keys[i] = (bits << 30) + (i if newest_first else (1 << 30) - 1 - i)


@compiled()
def _nth(numbers, n):
    """The `n`-th smallest number, from 0; a search that sorts no more than it must (Hoare 1961)."""
    x, low, high = numbers.copy(), 0, len(numbers) - 1
    while low < high:
        pivot, i, j = x[(low + high) // 2], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i, j = i + 1, j - 1
        if j < n < i:
            break
        low, high = (low, j) if n <= j else (i, high)
    return x[n]


@compiled()
def _place(scores, old, kept, numbers, counts, keys, tiers):
    """Tier of every slot that stays, of one voter, see `choose`."""
    _, sinks, recent, fp16_sinks, fp16_recent = numbers
    n, native = len(kept), len(counts)
    rank = np.empty(n, np.float32)
    for i in range(n):
        rank[i] = np.inf if i < sinks or i >= n - recent else scores[kept[i]]
    _rising(rank, 0, n, False, keys)
    for i in range(n):
        held = fp16_sinks <= i < n - fp16_recent
        tiers[i] = native - 1 if held else native
        if not held:
            keys[i] = PLACED
    wanted = np.empty(n, np.int64)
    for tier in range(native - 1):
        if counts[tier] == 0:
            continue
        for i in range(n):
            was = old[kept[i]]
            spoilt = keys[i] > PLACED and was != native and was > tier
            wanted[i] = keys[i] - SPOILT if spoilt else keys[i]
        least = _nth(wanted, n - counts[tier])
        for i in range(n):
            if wanted[i] >= least:
                tiers[i], keys[i] = tier, PLACED
    for i in range(n):
        if i < fp16_sinks or i >= n - fp16_recent:
            tiers[i] = native


@compiled()
def choose(scores, old, numbers, counts, keep, tiers):
    """Who stays, and where, of the slots of each voter, see `choose_slots.reference`.

    Args:
        scores: `[M, N]` fp32.
        old: pools before `[M, N]`.
        numbers: slots dropped, sinks, recent window, and sinks and newest slots in 16 bits.
        counts: slots of each tier.
        keep: slots that stay `[M, N']`, to fill.
        tiers: their pools, or of no size if there are no tiers.
    """
    gone, sinks, recent = numbers[0], numbers[1], numbers[2]
    N = scores.shape[1]
    last = N - recent
    keys = np.empty(N, np.int64)
    for m in range(scores.shape[0]):
        kept = keep[m]
        if gone:
            _rising(scores[m], sinks, last, True, keys)
            among = keys[: last - sinks]
            stay, at = gone < len(among), 0
            least = _nth(among, gone) if stay else np.int64(0)
            for i in range(N):
                if i < sinks or i >= last or (stay and keys[i - sinks] >= least):
                    kept[at] = i
                    at += 1
        else:
            for i in range(N):
                kept[i] = i
        if tiers.size:
            _place(scores[m], old[m], kept, numbers, counts, keys[: len(kept)], tiers[m])
