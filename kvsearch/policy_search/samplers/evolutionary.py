"""The evolutionary sampler: what remains of `kvei` without its Gaussian process."""

import random
from collections.abc import Mapping

from kvsearch.policy_search.samplers.history import History
from kvsearch.policy_search.samplers.point import PointSampler
from kvsearch.policy_search.samplers.pool import offspring
from kvsearch.policy_space import Value

CHILDREN = 0.85  # share of proposals with parents, the rest is random
FRONT = 0.25  # share of those whose parents are the front, else the best within the budget
BEST = 6  # parents
TRIES = 50  # children until one is feasible and new


class Evolutionary(PointSampler):
    """Children of the best policies and of the front, one or two knobs changed."""

    def propose(self, history: History, rng: random.Random) -> Mapping[str, Value] | None:
        """A child that is feasible and new, or None."""
        if rng.random() >= CHILDREN:
            return None
        seen = history.front()[::-1] if rng.random() < FRONT else history.best()[:BEST]
        parents = [s.point.knobs for s in seen]
        for _ in range(TRIES if parents else 0):
            child = offspring(self.context.space, parents, rng)
            point = self.context.price(child) if child is not None else None
            if point is not None and point.fingerprint not in history.tried:
                return point.knobs
        return None
