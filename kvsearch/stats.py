"""Paired differences of per-token NLL with block-bootstrap intervals.

Neighbouring tokens are correlated, so whole blocks are resampled; windows never share a block.
Independent-token standard errors are up to four times too small here.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.records import Interval

Array = NDArray[np.floating[Any]]
BLOCK = 64
RESAMPLES = 20_000
SLICE = 1_000  # resamples at once


def block_sums(x: Array, block: int = BLOCK) -> tuple[Array, Array]:
    """Sums and sizes of consecutive blocks of each row of `x` `[windows, tokens]`."""
    x = np.atleast_2d(np.asarray(x, dtype=np.float64))
    starts = np.arange(0, x.shape[1], block)
    sums = np.add.reduceat(x, starts, axis=1)
    sizes = np.diff([*starts, x.shape[1]])
    return sums.ravel(), np.tile(sizes, x.shape[0]).astype(np.float64)


def interval(
    x: Array, *, level: float = 0.95, block: int = BLOCK, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean of `x` `[windows, tokens]` with a block-bootstrap percentile interval."""
    sums, sizes = block_sums(x, block)
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    for start in range(0, resamples, SLICE):  # so that long texts need no gigabytes
        some = means[start : start + SLICE]
        picks = rng.integers(0, len(sums), size=(len(some), len(sums)))
        some[:] = sums[picks].sum(1) / sizes[picks].sum(1)
    lo, hi = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sums.sum() / sizes.sum()), float(lo), float(hi))


def corrected(rows: int, level: float = 0.95) -> float:
    """The level of one interval so that `rows` of them all hold at once at `level` (Bonferroni)."""
    return 1 - (1 - level) / max(1, rows)


def paired(a: Array, b: Array, **options: Any) -> Interval:
    """Interval of the mean of `a - b`, token by token; below 0 says that `a` is better."""
    if np.shape(a) != np.shape(b):
        raise ValueError(f"paired differences need equal shapes, got {np.shape(a)}, {np.shape(b)}")
    return interval(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64), **options)


def standard_error(x: Array, block: int = BLOCK) -> float:
    """Block standard error of the mean of `x` `[windows, tokens]`."""
    sums, sizes = block_sums(x, block)
    mean = sums.sum() / sizes.sum()
    n = len(sums)
    if n < 2:
        return float("nan")
    residual = sums - mean * sizes
    return float(np.sqrt(n / (n - 1) * (residual**2).sum()) / sizes.sum())
