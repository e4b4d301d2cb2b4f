"""What a point of the space costs, exactly and before a token is spent."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy, check
from kvsearch.policy_search.samplers.pool import anything
from kvsearch.policy_space import SearchSpace, Setting, Value, sized
from kvsearch.policy_space.features import features, names_for

Speed = Callable[[Policy], float]
ANYWHERE = 500  # random points that every proposal considers; priced once, in a fifth of a second
KEPT = 20_000  # prices remembered, about 40 MB; a search of a thousand trials needs 40 000


@dataclass(frozen=True, eq=False)
class Priced:
    """A point of the space and what follows from it without an evaluation.

    Attributes:
        knobs: values of the active axes.
        fingerprint: identity of the policy they build.
        bytes_peak: bytes per sequence.
        features: numbers of `names_for` the space, see `features`.
        feasible: neither forbidden by the space nor over the budget.
        speed: modelled decode tokens/s over the full cache's; 0 if speed is no objective.
    """

    knobs: dict[str, Value]
    fingerprint: str
    bytes_peak: int
    features: tuple[float, ...]
    feasible: bool
    speed: float = 0.0


@dataclass(frozen=True)
class Context:
    """The task as samplers see it, with prices that it remembers; one per study, shared by all.

    Attributes:
        space: where to look.
        setting: model shape, budget and length that policies are sized for.
        speed: modelled decode speed of a policy over the full cache's, if it is an objective.
    """

    space: SearchSpace
    setting: Setting
    speed: Speed | None = None
    _known: dict[frozenset[tuple[str, Value]], Priced | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def price(self, knobs: Mapping[str, Value]) -> Priced | None:
        """The price of a point that may be proposed, or None if it may not."""
        if self.space.forbidden(knobs) is not None:  # known without building the policy
            return None
        priced = self.look(knobs)
        return priced if priced is not None and priced.feasible else None

    def look(self, knobs: Mapping[str, Value]) -> Priced | None:
        """The price of any point that builds a policy, or None."""
        key = frozenset(knobs.items())
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = self._price(dict(knobs))
        return self._known[key]

    @cached_property
    def anywhere(self) -> list[Priced]:
        """Random points that may be proposed, the same for all proposals of every run.

        To price new ones each time would take most of the time of a proposal.
        """
        rng = random.Random(0)
        points = [self.price(anything(self.space, rng)) for _ in range(ANYWHERE)]
        return [p for p in points if p is not None]

    @cached_property
    def _features(self) -> tuple[str, ...]:
        return names_for(self.space)

    def _price(self, knobs: dict[str, Value]) -> Priced | None:
        setting, shape = self.setting, self.setting.shape
        try:
            policy, peak = sized(knobs, setting)
            check(policy, shape, prompt=setting.prompt)
        except PolicyError:
            return None
        feasible = setting.budget_bytes is None or peak <= setting.budget_bytes
        return Priced(
            knobs,
            policy.fingerprint(shape.layers),
            peak,
            features(policy, setting, self._features),
            feasible and self.space.forbidden(knobs) is None,
            0.0 if self.speed is None else self.speed(policy),
        )
