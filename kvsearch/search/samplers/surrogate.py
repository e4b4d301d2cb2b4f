"""The model of quality: a Gaussian process on log dNLL over the features of a policy."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import log10
from statistics import fmean, pvariance

import numpy as np
from threadpoolctl import ThreadpoolController

from kvsearch.search.samplers.gp import GP, Array, fit
from kvsearch.search.samplers.history import History, Seen
from kvsearch.search.samplers.pricing import Priced

OFFSET = 0.003  # nats per token: differences far below it are noise and must not rule the log
LEAST = 0.001  # nats per token: what the logarithm sees at least
PAIRS = 4  # completed trials with a rung, below which that rung says nothing
EXTRAPOLATION_VARIANCE = (
    0.05**2
)  # variance in decades squared added to what a rung foretells: few pairs, and those
# who were stopped there were partly unlucky there
_libraries = ThreadpoolController()  # NumPy's BLAS


class Surrogate:
    """Predicts log10(dNLL + offset), fitted on what was measured and conditioned on what runs.

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
            foretold = self._foretold(seen, history.done)
            if foretold is not None:
                points.append(seen.point)
                heights.append(foretold[0])
                extra.append(foretold[1])
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

    def _foretold(self, stopped: Seen, done: Sequence[Seen]) -> tuple[float, float] | None:
        """Mean and variance of the final height of a trial that was stopped at a rung.

        Judged by how much completed trials rose from the same rung. In a part of a window, a cache
        that is not well full has shown little yet: those with at most half as many slots as that
        part has tokens are asked first. While there are too few (a large budget, four bits), all
        are: they rise a little more than a policy that was worth stopping.
        """
        *rung, dnll = stopped.rungs[-1]
        rises = [
            (self.height(s.dnll) - self.height(then), tokens == s.rungs[-1][1] or _full(s, tokens))
            for s in done
            for windows, tokens, then in s.rungs
            if s.dnll is not None and [windows, tokens] == rung
        ]
        fair = [rise for rise, shown in rises if shown]
        if len(fair) < PAIRS:
            fair = [rise for rise, _ in rises]
        if len(fair) < PAIRS:
            return None
        wide = pvariance(fair) * len(fair) / (len(fair) - 1)
        return self.height(dnll) + fmean(fair), wide * (1 + 1 / len(fair)) + EXTRAPOLATION_VARIANCE


def _one_thread() -> AbstractContextManager[object]:
    """A second thread would do little with matrices this small and keep a core that evaluates."""
    return _libraries.limit(limits=1, user_api="blas")


def _full(seen: Seen, tokens: int) -> bool:
    """Whether so many tokens fill its cache twice over."""
    return 2 * seen.point.slots <= tokens


def _matrix(points: Sequence[Priced]) -> Array:
    return np.array([p.features for p in points], dtype=np.float64)
