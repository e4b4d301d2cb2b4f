"""The model of the loss: a Gaussian process on log dNLL over the features of a policy."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import log10
from statistics import fmean, pvariance

import numpy as np
from threadpoolctl import ThreadpoolController

from kvsearch.search.samplers.gp import GP, Array, fit
from kvsearch.search.samplers.history import History, Seen
from kvsearch.search.samplers.pricing import Priced

OFFSET = (
    0.003  # nats per token: far smaller differences are noise and must not dominate the logarithm
)
LEAST = 0.001  # nats per token: least argument of the logarithm
PAIRS = 4  # completed trials with a rung that an extrapolation from that rung needs
# Decades squared, added to the variance of an extrapolation: it rests on few pairs, and a policy is
# stopped at a rung partly because its loss there is high by chance.
EXTRAPOLATION_VARIANCE = 0.05**2
_libraries = ThreadpoolController()  # NumPy's BLAS


class Surrogate:
    """Predicts log10(dNLL + offset); fitted to measured trials, conditioned on running ones.

    Attributes:
        offset: nats per token; 0.003, or more if a policy beats the full cache by more than 0.002.
        heights: the logarithms of `history.done`, in their order.
    """

    def __init__(self, history: History) -> None:
        values = [s.dnll or 0.0 for s in history.done]
        self.offset = max(OFFSET, LEAST - min(values))
        self.heights = [self.height(v) for v in values]
        points = [s.point for s in history.done]
        heights, extra = list(self.heights), [0.0] * len(points)
        for seen in history.stopped:
            final = self._extrapolated(seen, history.done)
            if final is not None:
                points.append(seen.point)
                heights.append(final[0])
                extra.append(final[1])
        with _one_thread():
            self.fitted: GP = fit(_matrix(points), np.array(heights), np.array(extra))
            self.gp = self.fitted.conditioned(_matrix(history.pending))

    def height(self, dnll: float) -> float:
        """log10 of a difference to the full cache, nats per token."""
        return log10(max(LEAST, dnll + self.offset))

    def predict(self, points: Sequence[Priced]) -> tuple[Array, Array]:
        """Mean and standard deviation of the height of each point."""
        with _one_thread():
            return self.gp.posterior(_matrix(points))

    def _extrapolated(self, stopped: Seen, done: Sequence[Seen]) -> tuple[float, float] | None:
        """Mean and variance of the final height of a trial that was stopped at a rung.

        The height at the rung plus the mean rise of completed trials from the same rung to the end.
        """
        *rung, dnll = stopped.rungs[-1]
        rises = [
            self.height(s.dnll) - self.height(then)
            for s in done
            for windows, tokens, then in s.rungs
            if s.dnll is not None and [windows, tokens] == rung
        ]
        if len(rises) < PAIRS:
            return None
        n, wide = len(rises), pvariance(rises)
        variance = wide * n / (n - 1) * (1 + 1 / n) + EXTRAPOLATION_VARIANCE
        return self.height(dnll) + fmean(rises), variance


def _one_thread() -> AbstractContextManager[object]:
    """BLAS with one thread: a second gains little on small matrices and takes another core."""
    return _libraries.limit(limits=1, user_api="blas")


def _matrix(points: Sequence[Priced]) -> Array:
    return np.array([p.features for p in points], dtype=np.float64)
