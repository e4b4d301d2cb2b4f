"""Quantiles of Student's t, without SciPy, which takes longer to import than all else here runs."""

from functools import lru_cache
from math import atan, cos, pi, sin, sqrt

import numpy as np

STEPS = 200  # of the bisection at most; it ends where a double cannot be halved


@lru_cache(maxsize=1 << 12)  # a bisection costs as much as a hundred intervals, which share few
def quantile(level: float, df: int) -> float:
    """Quantile of Student's t.

    The distribution function of whole degrees of freedom is a finite sum (Abramowitz and Stegun,
    26.7.3 and 26.7.4), and is inverted by bisection.

    Args:
        level: probability below the quantile, 0.5 to below 1.
        df: degrees of freedom, 1 or more.

    Raises:
        ValueError: one of them is out of its range.
    """
    if not 0.5 <= level < 1 or df < 1:
        raise ValueError(
            f"no quantile of Student's t for level {level} and {df} degrees of freedom"
        )
    low, high = 0.0, 1.0
    while _central(high, df) < 2 * level - 1:
        low, high = high, 2 * high
    for _ in range(STEPS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _central(middle, df) < 2 * level - 1 else (low, middle)
    return high


def _central(t: float, df: int) -> float:
    """Probability between -t and t."""
    angle = atan(t / sqrt(df))
    odd = df % 2
    # ratios of neighbouring terms: 2/3, 4/5, ... cos^2 if odd; 1/2, 3/4, ... cos^2 if even
    first = np.arange(1 + odd, df - 2 + odd, 2)
    terms = np.cumprod((first / (first + 1)) * cos(angle) ** 2)
    total = 1 + float(terms.sum())
    if not odd:
        return sin(angle) * total
    return 2 / pi * (angle + (sin(angle) * cos(angle) * total if df > 1 else 0.0))
