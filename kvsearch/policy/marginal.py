"""Splitting what there is by marginal loss: the next slot, or bit, goes where it saves most.

Every head has a curve of loss over what it gets; the optimum of a sum of convex curves under one
total takes their segments in order of slope (rate-distortion, Everett 1963; applied to bits by
Shoham and Gersho 1988). A curve that is not convex is replaced by its lower hull.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray


def hull(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points on the lower convex hull of a curve, by rising `x`; `y` falls on it."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    lowest = min(range(len(kept)), key=lambda j: (y[kept[j]], j))
    return kept[: lowest + 1]


def split(
    sizes: Sequence[float], losses: ArrayLike, total: float, floor: float
) -> NDArray[np.float64]:
    """What each of N heads gets of `total`, at least `floor` each.

    Args:
        sizes: where the curves are known, rising.
        losses: `[N, len(sizes)]`.
        total: to share out; beyond the last size nothing is gained, and what is left is spread
            evenly.
        floor: least of every head; below the first size, its loss counts.
    """
    curves = np.asarray(losses, dtype=np.float64)
    got = np.full(len(curves), float(floor))
    steps: list[tuple[float, int, float]] = []  # slope, head, up to
    for head, curve in enumerate(curves):
        x = [float(floor), *(s for s in sizes if s > floor)]
        y = [float(np.interp(s, sizes, curve)) for s in x]
        on = hull(x, y)
        for a, b in pairwise(on):
            steps.append(((y[b] - y[a]) / (x[b] - x[a]), head, x[b]))
    left = total - got.sum()
    for _, head, end in sorted(steps):
        step = min(end - got[head], left)
        got[head] += step
        left -= step
    return got + max(0.0, left) / len(got)


def choose(
    losses: Sequence[ArrayLike], costs: Sequence[Sequence[float]], total: float
) -> list[int]:
    """Which option each of N choosers takes, so that costs add up to at most `total`.

    Args:
        losses: per chooser, the loss of each of its options.
        costs: per chooser, what each option costs, in the same order.
        total: that all may cost together.

    Returns:
        Option per chooser. Only options on a chooser's hull are taken, the cheapest at least.
    """
    picked, steps = [], []
    left = total
    for i, (lost, cost) in enumerate(zip(losses, costs, strict=True)):
        y = [float(v) for v in np.asarray(lost)]
        order = sorted(range(len(cost)), key=lambda j: (cost[j], y[j]))
        on = [order[k] for k in hull([cost[j] for j in order], [y[j] for j in order])]
        picked.append(on[0])
        left -= cost[on[0]]
        for a, b in pairwise(on):
            steps.append(((y[b] - y[a]) / (cost[b] - cost[a]), i, b, cost[b] - cost[a]))
    stuck: set[int] = set()
    for _, i, option, more in sorted(steps):
        if i in stuck or more > left:
            stuck.add(i)  # its steps follow each other
            continue
        picked[i] = option
        left -= more
    return picked
