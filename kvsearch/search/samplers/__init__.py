"""Samplers by name. Nothing heavy is imported before one is made."""

from typing import Any

from kvsearch.errors import KvsearchError, nearest

NAMES = ("random", "tpe")
DEFAULT = "tpe"


def check_name(name: str) -> None:
    """Raise if there is no such sampler."""
    if name not in NAMES:
        raise KvsearchError(f"unknown sampler {name!r}{nearest(name, NAMES)}")


def make_sampler(name: str, space: Any, setting: Any) -> Any:
    """From a seed to a sampler."""
    import optuna

    def make(seed: int) -> optuna.samplers.BaseSampler:
        if name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(
            seed=seed, multivariate=True, group=True, constant_liar=True
        )

    return make
