"""How good a set of policies is, as one number: the hypervolume in log bytes and log loss.

Both axes are logarithms: a halving of bytes or of loss counts the same at any size. The
reference point lies at twice the budget: most people deploy the best policy at the budget, so it
counts about as much as the whole range below it.
"""

from collections.abc import Sequence
from math import log10

from kvsearch.pareto import hypervolume

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
