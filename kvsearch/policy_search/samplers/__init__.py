"""Samplers: what proposes the next policy. A new one is a function and a line of `SAMPLERS`.

The driver makes a new object for every trial, with a seed that depends on the trial's number, so
that a study resumed after a kill proposes what an uninterrupted one would have. A sampler may
therefore use only its seed, the context and `study.trials`.
"""

import copy
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvsearch.errors import KvsearchError, nearest, one_line, quoted
from kvsearch.extensions import extend
from kvsearch.policy_search.samplers.pricing import Context, Priced
from kvsearch.policy_space import SearchSpace, Setting

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

__all__ = [
    "DEFAULT",
    "NAMES",
    "SAMPLERS",
    "Context",
    "Priced",
    "check_name",
    "check_space",
    "make",
    "make_sampler",
    "name_of",
]


def _random(seed: int, context: Context) -> "BaseSampler":
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=seed)


def _nsga2(seed: int, context: Context) -> "BaseSampler":
    """KVTuner's settings: Optuna's defaults, a population of 50."""
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(seed=seed, population_size=50, crossover_prob=0.9, swapping_prob=0.5)


def _tpe(seed: int, context: Context) -> "BaseSampler":
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import TPESampler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)  # says `group` is experimental
        return TPESampler(
            seed=seed,
            n_startup_trials=10,
            n_ei_candidates=24,
            multivariate=True,
            group=True,
            constant_liar=True,
        )


def _gp(seed: int, context: Context) -> "BaseSampler":
    """Optuna's own; it models only the axes that are always active.

    Its model does not change after a rejected proposal and hardly after a repeated one, so it would
    make the same proposal again and again. The proposal after such a one is therefore random.
    """
    from optuna.samplers import GPSampler, RandomSampler

    class Gp(GPSampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            before = [t for t in study.get_trials(deepcopy=False) if t.number < trial.number]
            stuck = bool(before) and _in_vain(before[-1], before[:-1])
            return {} if stuck else super().infer_relative_search_space(study, trial)

    return Gp(
        seed=seed,
        independent_sampler=RandomSampler(seed=seed),
        n_startup_trials=10,
        deterministic_objective=False,
        warn_independent_sampling=False,
    )


def _in_vain(last: Any, before: list[Any]) -> bool:
    """Whether a trial was rejected, or is the same policy as one before it."""
    if any(v > 0 for v in last.constraints.values()):
        return True
    if last.values is None:
        return any(t.params == last.params for t in before)
    return any(t.values == last.values for t in before)


def _evolutionary(seed: int, context: Context) -> "BaseSampler":
    from kvsearch.policy_search.samplers.evolutionary import Evolutionary

    return Evolutionary(seed, context)


def _kvei(seed: int, context: Context) -> "BaseSampler":
    from kvsearch.policy_search.samplers.kvei import Kvei

    return Kvei(seed, context)


SAMPLERS: dict[str, Callable[[int, Context], "BaseSampler"]] = {
    "random": _random,
    "nsga2": _nsga2,
    "tpe": _tpe,
    "gp": _gp,
    "evolutionary": _evolutionary,
    "kvei": _kvei,
}


def _wrong(name: str, made: Any) -> str | None:
    return None if callable(made) else "it is no function of a seed and a context"


extend(SAMPLERS, "samplers", _wrong)
NAMES = tuple(SAMPLERS)
DEFAULT = "kvei"


def name_of(sampler: "str | BaseSampler") -> str:
    """The name of a sampler in records: of an object, its class."""
    return sampler if isinstance(sampler, str) else type(sampler).__name__


def check_name(sampler: "str | BaseSampler") -> None:
    """Raise a `KvsearchError` if there is no such sampler, or what it needs is not installed."""
    if isinstance(sampler, str):
        if sampler not in SAMPLERS:
            raise KvsearchError(f"unknown sampler {quoted(sampler)}{nearest(sampler, SAMPLERS)}")
        if sampler == "gp" and find_spec("scipy") is None:
            raise KvsearchError("the sampler gp needs SciPy: pip install 'kvsearch[gp]'")
        return
    from optuna.samplers import BaseSampler

    if not isinstance(sampler, BaseSampler):
        raise KvsearchError(
            f"the sampler is of type {quoted(name_of(sampler))}; give a name "
            f"({', '.join(NAMES)}) or an object of optuna.samplers"
        )


def check_space(sampler: "str | BaseSampler", space: SearchSpace) -> None:
    """Raise a `KvsearchError` if a space holds what a sampler cannot handle.

    All of the named ones draw words, whole numbers and numbers, evenly or in ratios. Optuna's
    Gaussian process knows only axes that are always active and would draw most of some spaces at
    random. A copy of a sampler object makes one proposal for two objectives.
    """
    active = sum(not axis.when for axis in space.axes.values())
    if sampler == "gp" and 2 * active < len(space.axes):
        raise KvsearchError(
            f"the sampler gp models only axes without conditions, {active} of the "
            f"{len(space.axes)} of the space {quoted(space.name)}; use kvei or tpe"
        )
    if not isinstance(sampler, str):
        _check_proposal(sampler, space)


def _check_proposal(sampler: "BaseSampler", space: SearchSpace) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["minimize"] * 2, sampler=copy.deepcopy(sampler))
    try:
        space.suggest(study.ask())
    except (ValueError, NotImplementedError, ImportError) as error:
        raise KvsearchError(
            f"{name_of(sampler)} cannot propose policies of the space {quoted(space.name)} "
            f"({one_line(str(error))}); use kvei or optuna.samplers.TPESampler"
        ) from error


def make(sampler: "str | BaseSampler", seed: int, context: Context) -> "BaseSampler":
    """A new sampler; an object is returned as it is.

    Args:
        sampler: a key of `SAMPLERS`, or an object.
        seed: any whole number; two samplers with the same seed propose the same.
        context: space and setting; share one per study, it remembers prices.

    Raises:
        KvsearchError: unknown name.
    """
    if not isinstance(sampler, str):
        return sampler
    check_name(sampler)
    return SAMPLERS[sampler](seed % 2**32, context)


def make_sampler(name: str, space: SearchSpace, setting: Setting) -> Callable[[int], "BaseSampler"]:
    """From a seed to a sampler; all of them share one context."""
    check_name(name)
    check_space(name, space)
    context = Context(space, setting)
    return lambda seed: make(name, seed, context)
