"""Non-dominated points and the area they dominate, in two dimensions, both to be minimised.

How good a set of policies is, as one number: the hypervolume in log bytes and log loss. Both axes
are logarithms: a halving of bytes or of loss counts the same at any size. The reference point lies
at twice the budget: most people deploy the best policy at the budget, so it counts about as much
as the whole range below it.
"""

from collections.abc import Sequence
from math import log10

import numpy as np


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates.

    A point dominates another when it is no larger in both coordinates and smaller in one. Of
    equal points the first is kept; points with a NaN are never kept.

    Args:
        points: pairs of any unit, smaller is preferred in both.

    Returns:
        Indices by rising first coordinate, so the second coordinate falls along the list.
    """
    if not points:
        return []
    xy = np.asarray(points, dtype=np.float64)
    order = np.lexsort((np.arange(len(xy)), xy[:, 1], xy[:, 0]))
    kept: list[int] = []
    lowest = None
    for i in order[~np.isnan(xy[order]).any(axis=1)]:
        y = xy[i, 1]
        if lowest is None or y < lowest:
            kept.append(int(i))
            lowest = y
    return kept


def nondominated(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other dominates, in any number of dimensions, as in `front`."""
    xs = np.asarray(points, dtype=np.float64)
    differing = [i for i, x in enumerate(xs.T) if not (x == x[0]).all()]
    if len(differing) < 3 <= len(xs.T):  # a sort is enough
        plane = (*differing, *(i for i in range(len(xs.T)) if i not in differing))[:2]
        return sorted(front([(x[plane[0]], x[plane[1]]) for x in xs.tolist()]))
    kept = []
    for i, x in enumerate(xs):
        better = (xs <= x).all(1) & (xs < x).any(1)
        twin = (xs[:i] == x).all(1).any() if i else False
        if not (np.isnan(x).any() or better.any() or twin):
            kept.append(i)
    return kept


def hypervolume(points: Sequence[tuple[float, float]], reference: tuple[float, float]) -> float:
    """Area that the points dominate inside the box below a reference point, exactly.

    Args:
        points: pairs to be minimised, in the units of `reference`.
        reference: worst corner of the box; points beyond it in either coordinate add nothing.

    Returns:
        Area in the product of the two units, 0 when no point lies inside the box.
    """
    inside = [p for p in points if p[0] < reference[0] and p[1] < reference[1]]
    corners = [inside[i] for i in front(inside)]
    area, ceiling = 0.0, float(reference[1])
    for x, y in corners:
        area += (reference[0] - x) * (ceiling - y)
        ceiling = y
    return area


FLOOR = 0.003  # nats per token: losses below it count as equal
REFERENCE_LOSS = 0.5  # nats per token over the full cache: more is of no use in deployment
REFERENCE_BYTES = 2.0  # times the budget


def log_loss(dnll: float) -> float:
    """log10 of the loss over the full cache in nats per token, flat below zero."""
    return log10(max(dnll, 0.0) + FLOOR)


def log_hypervolume(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Hypervolume of (bytes, dNLL) pairs in decades squared; larger is better.

    Args:
        points: bytes per sequence, and nats per token over the full cache. Points over the budget
            add nothing.
        budget: bytes per sequence.
    """
    inside = [(log10(b / budget), log_loss(d)) for b, d in points if b <= budget]
    return hypervolume(inside, (log10(REFERENCE_BYTES), log_loss(REFERENCE_LOSS)))
