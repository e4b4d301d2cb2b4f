"""Size probes: the best policy so far at sizes without a trial.

A front needs policies of several sizes, and no model knows how the loss grows with fewer bytes
before it has seen a policy at two of them. Methods are all of one size.
"""

from collections.abc import Mapping

from kvsearch.policy_search.samplers.history import History
from kvsearch.policy_search.samplers.pricing import Context
from kvsearch.policy_space import Axis, Value

AXIS = "budget_fraction"  # share of the budget that a policy may spend
SIZES = 4  # of an axis that is a range


def size_probe(history: History, context: Context) -> Mapping[str, Value] | None:
    """The best policy at the largest size without a trial; None once it has been everywhere."""
    axis, best = context.space.axes.get(AXIS), history.best()
    if axis is None or not best:
        return None
    sizes = _sizes(axis)
    points = [s.point for s in history.done] + history.pending
    taken = {_nearest(sizes, p.knobs[AXIS]) for p in points if AXIS in p.knobs}
    for size in sorted(set(sizes) - taken, reverse=True):
        point = context.price({**best[0].point.knobs, AXIS: size})
        if point is not None and point.fingerprint not in history.tried:
            return point.knobs
    return None


def _sizes(axis: Axis) -> list[float]:
    if axis.choice is not None:
        return [float(c) for c in axis.choice]
    return [float(axis.at(i / (SIZES - 1))) for i in range(SIZES)]


def _nearest(sizes: list[float], value: Value) -> float:
    return min(sizes, key=lambda s: abs(s - float(value)))
