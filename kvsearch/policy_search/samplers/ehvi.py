"""Expected gain of area under the front, in closed form.

Bytes are known before a policy runs, so a candidate's place on the x axis is certain and only its
height is not. The area that it would add is a sum over the steps of the staircase to its right,
each one a width times a one-dimensional expected improvement.
"""

from collections.abc import Sequence
from math import erfc

import numpy as np
from numpy.typing import NDArray

from kvsearch.results.pareto import front

Array = NDArray[np.float64]
_erfc = np.vectorize(erfc, otypes=[np.float64])  # a few thousand numbers: less than SciPy's import


def expected_improvement(ceiling: Array, mean: Array, std: Array) -> Array:
    """E[max(0, ceiling - Y)] for Y normal; arrays broadcast, `std` is above 0."""
    z = (ceiling - mean) / std
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    below = 0.5 * _erfc(-z / np.sqrt(2))
    return np.maximum(0.0, std * (z * below + density))


def expected_gain(
    points: Sequence[tuple[float, float]],
    reference: tuple[float, float],
    x: Array,
    mean: Array,
    std: Array,
) -> Array:
    """Expected gain in hypervolume of candidates at known `x` with normal heights.

    Args:
        points: the front, or any points, as (x, y); both are minimised.
        reference: worst corner; what lies beyond it adds nothing.
        x: `[C]`, the candidates' first coordinate.
        mean: `[C]`, of the second.
        std: `[C]`, of the second, above 0.

    Returns:
        `[C]`, in units of x times y.
    """
    inside = [p for p in points if p[0] < reference[0] and p[1] < reference[1]]
    steps = [inside[i] for i in front(inside)]
    left = np.array([-np.inf, *(p[0] for p in steps)])
    right = np.array([*(p[0] for p in steps), reference[0]])
    ceiling = np.array([reference[1], *(p[1] for p in steps)])
    width = np.maximum(0.0, right - np.maximum(left, x[:, None]))
    row, step = np.nonzero(width)
    each = expected_improvement(ceiling[step], mean[row], std[row])
    total: Array = np.bincount(row, width[row, step] * each, len(x)).astype(np.float64)
    return total
