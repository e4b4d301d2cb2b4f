"""Where the next policy comes from: published methods first, then breeding and Optuna.

Most free proposals are bred from the best policies so far, the others are Optuna's. What is bred is
enqueued, so Optuna learns from all of them.
"""

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from kvsearch.knobs import Value
from kvsearch.space import Axis, SearchSpace

SLIDE = 0.3  # share of children that are a parent at another size: that is what makes a front


def make_study(seed: int) -> optuna.Study:
    """An in-memory study of (dNLL, bytes), both minimised; `trials.jsonl` is the durable record."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # says `group` only
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, n_startup_trials=16, constant_liar=False
        )
    return optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)


def breed(
    space: SearchSpace, parents: Sequence[Mapping[str, Value]], rng: random.Random
) -> dict[str, Value] | None:
    """A child of two of `parents`, best first, with one or two knobs changed; None without parents.

    Most of the child comes from one parent, usually the best. Crossing matters here: what helps on
    one axis (bits, interval, budgets per layer) mostly helps on top of what helps on another.
    """
    if not parents:
        return None
    first = parents[0] if rng.random() < 0.6 else rng.choice(parents)
    second = rng.choice(parents)
    child = {**first, **{k: v for k, v in second.items() if rng.random() < 0.3}}
    for name in rng.sample(sorted(space.axes), k=rng.choice([1, 1, 2])):
        child[name] = _other(space.axes[name], child.get(name), rng)
    child["fill"] = first.get("fill", 1.0)
    if "fill" in space.axes and rng.random() < SLIDE:
        child = {**first, "fill": _other(space.axes["fill"], first.get("fill"), rng)}
    return space.suggest(_Replay(child, rng))


def _other(axis: Axis, value: Value | None, rng: random.Random) -> Value:
    if axis.choice is not None:
        options = [c for c in axis.choice if c != value] or list(axis.choice)
        return rng.choice(options)
    if axis.int_ is not None:
        return rng.randrange(axis.int_[0], axis.int_[1] + 1, axis.int_[2])
    assert axis.float_ is not None
    return rng.uniform(*axis.float_)


class _Replay:
    """Stands in for an Optuna trial: gives the wished value, or draws one where none is wished."""

    def __init__(self, wished: Mapping[str, Value], rng: random.Random) -> None:
        self.wished, self.rng = wished, rng

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        return self.wished.get(name, self.rng.choice(choices))

    def suggest_int(self, name: str, low: int, high: int, step: int = 1) -> Any:
        return self.wished.get(name, self.rng.randrange(low, high + 1, step))

    def suggest_float(self, name: str, low: float, high: float, log: bool = False) -> Any:
        return self.wished.get(name, self.rng.uniform(low, high))
