"""The model of the loss: a Gaussian process on log dNLL over the features of a policy."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import log10

import numpy as np
from threadpoolctl import ThreadpoolController

from kvsearch.policy_search.samplers.gp import GP, Array, fit
from kvsearch.policy_search.samplers.history import History
from kvsearch.policy_search.samplers.pricing import Priced

OFFSET = (
    0.003  # nats per token: far smaller differences are noise and must not dominate the logarithm
)
LEAST = 0.001  # nats per token: least argument of the logarithm
_libraries = ThreadpoolController()  # NumPy's BLAS


class Surrogate:
    """Predicts log10(dNLL + offset); fitted to measured trials, conditioned on running ones.

    Attributes:
        offset: nats per token; 0.003, or more if a policy beats the full cache by more than 0.002.
        heights: the logarithms of `history.done`, in their order.
    """

    def __init__(self, history: History) -> None:
        values = [s.dnll for s in history.done]
        self.offset = max(OFFSET, LEAST - min(values))
        self.heights = [self.height(v) for v in values]
        points = [s.point for s in history.done]
        with _one_thread():
            self.fitted: GP = fit(_matrix(points), np.array(self.heights))
            self.gp = self.fitted.conditioned(_matrix(history.pending))

    def height(self, dnll: float) -> float:
        """log10 of a difference to the full cache, nats per token."""
        return log10(max(LEAST, dnll + self.offset))

    def predict(self, points: Sequence[Priced]) -> tuple[Array, Array]:
        """Mean and standard deviation of the height of each point."""
        with _one_thread():
            return self.gp.posterior(_matrix(points))


def _one_thread() -> AbstractContextManager[object]:
    """BLAS with one thread: a second gains little on small matrices and takes another core."""
    return _libraries.limit(limits=1, user_api="blas")


def _matrix(points: Sequence[Priced]) -> Array:
    return np.array([p.features for p in points], dtype=np.float64)
