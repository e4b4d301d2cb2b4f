"""Paired differences of per-token NLL with block-bootstrap intervals.

Neighbouring tokens are correlated, so whole blocks are resampled; windows never share a block.
Independent-token standard errors are up to four times too small here.

All of it follows from the sums over blocks, so every function takes losses per token or as
`Blocks`, with the same result.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.records import Interval

Array = NDArray[np.floating[Any]]
BLOCK = 64
RESAMPLES = 20_000
SLICE = 1_000  # resamples at once


@dataclass(frozen=True)
class Blocks:
    """Losses as sums over blocks of consecutive tokens; no block spans two windows.

    Args:
        sums: `[windows, blocks]` float64, nats.
        tokens: `[blocks]` tokens of each block, the same in every window; the last may have fewer.
    """

    sums: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @property
    def size(self) -> int:
        """Tokens in all windows together."""
        return len(self.sums) * int(self.tokens.sum())

    def mean(self) -> float:
        """Mean loss in nats per token."""
        return float(self.sums.sum() / self.size)


Losses = Array | Blocks


def blocks(x: Losses, block: int = BLOCK) -> Blocks:
    """Losses in blocks of `block` tokens.

    Args:
        x: losses per token `[windows, tokens]`, or in blocks of which `block` is a multiple.
        block: tokens.

    Raises:
        ValueError: `x` is in blocks that do not fit into these.
    """
    if not isinstance(x, Blocks):
        each = np.atleast_2d(x).astype(np.float64)
        return _merged(Blocks(each, np.ones(each.shape[1], dtype=np.int64)), block)
    have = int(x.tokens[0])
    if block < have or (block % have and len(x.tokens) > 1):
        raise ValueError(f"losses in blocks of {have} tokens cannot be put into {block}")
    return _merged(x, block // have)


def _merged(x: Blocks, count: int) -> Blocks:
    starts = np.arange(0, len(x.tokens), count)
    return Blocks(np.add.reduceat(x.sums, starts, axis=1), np.add.reduceat(x.tokens, starts))


def interval(
    x: Losses, *, level: float = 0.95, block: int = BLOCK, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean of `x` with a block-bootstrap percentile interval."""
    sums, sizes = _flat(x, block)
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


def paired(a: Losses, b: Losses, *, level: float = 0.95, block: int = BLOCK) -> Interval:
    """Interval of the mean of `a - b` on the same tokens; below 0 says that `a` is better."""
    one, other = blocks(a, block), blocks(b, block)
    if one.sums.shape != other.sums.shape or (one.tokens != other.tokens).any():
        shapes = f"{one.sums.shape} and {other.sums.shape} blocks"
        raise ValueError(f"paired differences need the same windows and tokens, got {shapes}")
    return interval(Blocks(one.sums - other.sums, one.tokens), level=level, block=block)


def standard_error(x: Losses, block: int = BLOCK) -> float:
    """Block standard error of the mean of `x`."""
    sums, sizes = _flat(x, block)
    mean = sums.sum() / sizes.sum()
    n = len(sums)
    if n < 2:
        return float("nan")
    residual = sums - mean * sizes
    return float(np.sqrt(n / (n - 1) * (residual**2).sum()) / sizes.sum())


def _flat(x: Losses, block: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums and sizes of the blocks of all windows."""
    found = blocks(x, block)
    return found.sums.ravel(), np.tile(found.tokens, len(found.sums)).astype(np.float64)
