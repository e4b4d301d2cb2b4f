"""Where candidates come from: children of good policies, their neighbours, and random points."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvsearch.knobs import Value
from kvsearch.space import Axis, SearchSpace

Knobs = dict[str, Value]
SIZE_PROBES = 0.3  # share of children that are a parent at another size: that is what makes a front
NUMBERS = 6  # values tried of an axis of numbers


class Draw:
    """Stands in for an Optuna trial: gives the wished value, or draws one where none is wished."""

    def __init__(self, wished: Mapping[str, Value], rng: random.Random) -> None:
        self.wished, self.rng = wished, rng

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        """A wished or random choice."""
        return self.wished[name] if name in self.wished else self.rng.choice(choices)

    def suggest_int(self, name: str, low: int, high: int, step: int = 1) -> Any:
        """A wished or random whole number."""
        return self.wished[name] if name in self.wished else self.rng.randrange(low, high + 1, step)

    def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> Any:
        """A wished or random number; the measure of a `log` axis is not worth the difference."""
        return self.wished[name] if name in self.wished else self.rng.uniform(low, high)


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
            for value in values(axis, rng):
                if value != point[name]:
                    yield name, space.suggest(Draw({**point, name: value}, rng))


def _crossed(
    first: Mapping[str, Value], second: Mapping[str, Value], rng: random.Random
) -> dict[str, Value]:
    return {**first, **{k: v for k, v in second.items() if rng.random() < 0.3}}


def _other(axis: Axis, value: Value | None, rng: random.Random) -> Value:
    if axis.choice is not None:
        options = [c for c in axis.choice if c != value] or list(axis.choice)
        return rng.choice(options)
    if axis.int_ is not None:
        return rng.randrange(axis.int_[0], axis.int_[1] + 1, axis.int_[2])
    assert axis.float_ is not None
    return rng.uniform(*axis.float_)


def values(axis: Axis, rng: random.Random) -> list[Value]:
    """All values of a choice, some of a range."""
    if axis.choice is not None:
        return list(axis.choice)
    return list(dict.fromkeys(_other(axis, None, rng) for _ in range(NUMBERS)))
