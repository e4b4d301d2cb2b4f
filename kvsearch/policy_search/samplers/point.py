"""Optuna samplers that choose a whole point at once."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial

from kvsearch.policy_search.samplers.history import History, read
from kvsearch.policy_search.samplers.pool import anything
from kvsearch.policy_search.samplers.pricing import Context, Priced
from kvsearch.policy_space import Value

TRIES = 400  # draws of a point that is feasible and new before giving up


class PointSampler(BaseSampler):
    """Chooses a point when its first value is asked for; Optuna then sees it value by value.

    Everything it knows it reads from the study's trials and its seed, so a new object with the same
    seed proposes the same. An enqueued trial never asks, and costs nothing.
    """

    def __init__(self, seed: int, context: Context) -> None:
        self.seed, self.context = seed, context
        self._point: tuple[int, dict[str, Value]] | None = None
        self._random = RandomSampler(seed=seed)

    def propose(self, history: History, rng: random.Random) -> Mapping[str, Value] | None:
        """The next point, or None to take a random one that is feasible and new."""
        raise NotImplementedError

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Nothing is sampled jointly by Optuna."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Nothing, see `infer_relative_search_space`."""
        return {}

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """One value of the chosen point; what the point lacks is drawn at random.

        A point lacks a value only when part of the trial was enqueued.
        """
        if self._point is None or self._point[0] != trial.number:
            history = read(study.get_trials(deepcopy=False), self.context, trial.number)
            rng = random.Random(self.seed)
            point = self.propose(history, rng) or self.fresh(history, rng).knobs
            self._point = (trial.number, dict(point))
        point = self._point[1]
        if param_name in point:
            return point[param_name]
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def fresh(self, history: History, rng: random.Random) -> Priced:
        """A random point, feasible and new if `TRIES` draws hold one."""
        price, last = self.context.price, None
        for _ in range(TRIES):
            knobs = anything(self.context.space, rng)
            point = price(knobs)
            if point is not None and point.fingerprint not in history.tried:
                return point
            last = point or last
        return last or Priced(knobs, "", 0, (), False)


def usable(points: Sequence[Priced | None], tried: set[str]) -> list[Priced]:
    """The feasible ones that are new, one per policy, in order."""
    out = {p.fingerprint: p for p in reversed(points) if p is not None}
    return [p for p in reversed(out.values()) if p.feasible and p.fingerprint not in tried]
