"""Splitting what there is by marginal loss: the next slot, or bit, goes where it saves most.

Every head has a curve of loss over what it gets; the optimum of a sum of convex curves under one
total takes their segments in order of slope (rate-distortion, Everett 1963; applied to bits by
Shoham and Gersho 1988). A curve that is not convex is replaced by its lower hull.
"""

from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike, NDArray


def hull(x: Sequence[float], y: Sequence[float]) -> list[int]:
    """Indices of the points on the lower convex hull of a curve, by rising `x`; `y` falls on it.

    Of points with the same `x` the first counts.
    """
    kept: list[int] = []
    for i in range(len(x)):
        if kept and x[i] == x[kept[-1]]:
            continue
        while len(kept) > 1:
            a, b = kept[-2:]
            if (y[b] - y[a]) * (x[i] - x[a]) <= (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    lowest = min(range(len(kept)), key=lambda j: (y[kept[j]], j))
    return kept[: lowest + 1]


class Split:
    """How N heads share any total.

    Args:
        sizes: where the curves of loss are known, rising.
        losses: `[N, len(sizes)]`.
    """

    def __init__(self, sizes: Sequence[float], losses: ArrayLike) -> None:
        self.least, curves = float(sizes[0]), np.asarray(losses, dtype=np.float64)
        steps: list[tuple[float, int, float]] = []  # slope, head, by how much it grows
        for head, y in enumerate(curves):
            for a, b in pairwise(hull(sizes, y)):
                more = sizes[b] - sizes[a]
                steps.append(((y[b] - y[a]) / more, head, more))
        steps.sort()
        self._many = len(curves)
        self._heads = np.array([head for _, head, _ in steps], dtype=np.int64)
        self._more = np.array([more for _, _, more in steps])
        self._until = self._more.cumsum()

    def at(self, total: float) -> NDArray[np.float64]:
        """What each head gets of `total`: the first size, then what saves most.

        Beyond the last size nothing is gained, and what is left is spread evenly; so is a total
        that does not pay for the first sizes.
        """
        got = np.full(self._many, min(self.least, total / self._many))
        left = total - got.sum()
        taken = np.clip(left - (self._until - self._more), 0, self._more)
        np.add.at(got, self._heads, taken)
        return got + (total - got.sum()) / self._many


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
    for _, i, option, more in sorted(steps, key=itemgetter(0)):  # a chooser's stay in order
        if i in stuck or more > left:
            stuck.add(i)  # its steps follow each other
            continue
        picked[i] = option
        left -= more
    return picked
