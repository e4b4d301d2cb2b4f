"""Where candidates come from: children of good policies, their neighbours, and random points."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvsearch.policy_space import Axis, SearchSpace, Value, drawn, on_grid

Knobs = dict[str, Value]
SIZE_PROBES = 0.3  # share of children that are a parent at another size: that is what makes a front
NEAR, FAR = 0.08, 0.3  # steps along an axis of numbers, as shares of its range
LOCAL = 0.5  # share of new numbers at most `FAR` away from the old one; the rest are from anywhere


class Drawing(Protocol):
    """What `Draw` needs of a `random.Random`."""

    def random(self) -> float:
        """A number from 0 to 1."""

    def choice(self, choices: Sequence[Any], /) -> Any:
        """One of several."""


class Draw:
    """Stands in for an Optuna trial: gives the wished value, or draws one where none is wished."""

    def __init__(self, wished: Mapping[str, Value], rng: Drawing) -> None:
        self.wished, self.rng = wished, rng

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        """A wished or random choice."""
        return self.wished[name] if name in self.wished else self.rng.choice(choices)

    def suggest_int(self, name: str, low: int, high: int, step: int = 1, log: bool = False) -> Any:
        """A wished or random whole number."""
        return self._number(name, low, high, step, log)

    def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> Any:
        """A wished or random number."""
        return self._number(name, low, high, None, log)

    def _number(self, name: str, low: float, high: float, step: int | None, log: bool) -> Any:
        if name in self.wished:
            return self.wished[name]
        return drawn(self.rng.random(), low, high, step, log)


def anything(space: SearchSpace, rng: random.Random) -> Knobs:
    """A random point."""
    return space.suggest(Draw({}, rng))


def offspring(
    space: SearchSpace, parents: Sequence[Mapping[str, Value]], rng: random.Random
) -> Knobs | None:
    """A child of two of `parents`, best first, with one or two knobs changed; None without parents.

    Most of the child comes from one parent, usually the best. Crossing matters here: what helps on
    one axis (bits, interval, budgets per layer) mostly helps on top of what helps on another.
    """
    if not parents:
        return None
    first = parents[0] if rng.random() < 0.6 else rng.choice(parents)
    child = _crossed(first, rng.choice(parents), rng)
    for name in rng.sample(sorted(space.axes), k=rng.choice([1, 1, 2])):
        child[name] = _other(space.axes[name], child.get(name), rng)
    child["budget_fraction"] = first.get("budget_fraction", 1.0)
    if "budget_fraction" in space.axes and rng.random() < SIZE_PROBES:
        child = {
            **first,
            "budget_fraction": _other(
                space.axes["budget_fraction"], first.get("budget_fraction"), rng
            ),
        }
    return space.suggest(Draw(child, rng))


def mutant(
    space: SearchSpace,
    parents: Sequence[Mapping[str, Value]],
    weights: Mapping[str, float],
    rng: random.Random,
) -> Knobs:
    """A child of `parents` with up to three knobs changed, picked in proportion to `weights`."""
    first = rng.choice(parents)
    child = _crossed(first, rng.choice(parents), rng) if rng.random() < 0.4 else dict(first)
    names = sorted(space.axes)
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        name = rng.choices(names, [weights[n] for n in names])[0]
        child[name] = _other(space.axes[name], child.get(name), rng)
    return space.suggest(Draw(child, rng))


def neighbours(
    space: SearchSpace, point: Mapping[str, Value], rng: random.Random
) -> Iterator[tuple[str, Knobs]]:
    """Yield (axis, point with that axis alone changed) for the active axes."""
    for name, axis in space.axes.items():
        if name in point:
            for value in values(axis, point[name]):
                if value != point[name]:
                    yield name, space.suggest(Draw({**point, name: value}, rng))


def _crossed(
    first: Mapping[str, Value], second: Mapping[str, Value], rng: random.Random
) -> dict[str, Value]:
    return {**first, **{k: v for k, v in second.items() if rng.random() < 0.3}}


def _other(axis: Axis, value: Value | None, rng: random.Random) -> Value:
    """Another value; a number is as likely near the one there was as anywhere."""
    if axis.choice is not None:
        options = [c for c in axis.choice if c != value] or list(axis.choice)
        return rng.choice(options)
    low, high, step = axis.range
    if value is None or rng.random() >= LOCAL:
        return drawn(rng.random(), low, high, step, axis.log)
    return axis.at(_clip(axis.place(value) + rng.choice((-1, 1)) * rng.uniform(0, FAR)))


def values(axis: Axis, value: Value) -> list[Value]:
    """All values of a choice; of a range its ends, and a near and a far step from `value`."""
    if axis.choice is not None:
        return list(axis.choice)
    low, high, step = axis.range
    here, least = axis.place(value), step or 0
    near = [
        min(float(value) - least, float(axis.at(_clip(here - NEAR)))),
        max(float(value) + least, float(axis.at(_clip(here + NEAR)))),
    ]
    far = [axis.at(_clip(here - FAR)), axis.at(_clip(here + FAR))]
    found = [low, far[0], *(on_grid(x, low, high, step) for x in near), far[1], high]
    return [v for v in dict.fromkeys(found) if v != value]


def _clip(place: float) -> float:
    return min(1.0, max(0.0, place))
