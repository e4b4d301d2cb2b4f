"""A run as an Optuna storage: one SQLite file that optuna-dashboard and Optuna's plots open."""

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from kvsearch.policy_search.optuna_study import FITS, excess, values_of
from kvsearch.results.records import Trial

METRICS = ("dNLL, nats per token", "peak bytes per sequence", "speed over the full cache")
_STATES = {"failed": TrialState.FAIL, "running": TrialState.FAIL}  # of those without values


def sqlite(name: str, about: Mapping[str, Any], trials: list[Trial], limit: int | None) -> bytes:
    """The content of a SQLite file with one study.

    Args:
        name: of the study.
        about: plain data, kept as the study's user attributes.
        trials: of the run; one that was running when the run stopped has failed.
        limit: bytes per sequence of the budget; what is above is infeasible.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    speed = any(t.speed is not None for t in trials)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        file = Path(place) / "study.db"
        storage = optuna.storages.RDBStorage(f"sqlite:///{file.as_posix()}")
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            directions=["minimize", "minimize", *(["maximize"] if speed else [])],
        )
        study.set_metric_names(list(METRICS[: 2 + speed]))
        for key, value in about.items():
            study.set_user_attr(key, value)
        ranges = distributions(trials)
        for trial in _in_order(trials):
            study.add_trial(_frozen(trial, ranges, limit))
        storage.remove_session()
        storage.engine.dispose()  # closes the file, so that it is whole
        return file.read_bytes()


def distributions(trials: list[Trial]) -> dict[str, BaseDistribution]:
    """Of every parameter, over the values that the trials have."""
    seen: dict[str, list[Any]] = {}
    for t in trials:
        for key, value in t.params.items():
            if value not in seen.setdefault(key, []):
                seen[key].append(value)
    return {key: _distribution(values) for key, values in seen.items()}


def _distribution(values: list[Any]) -> BaseDistribution:
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or len(values) < 2:
        return CategoricalDistribution(values)
    low, high = min(numbers), max(numbers)
    if all(isinstance(v, int) for v in numbers):
        return IntDistribution(int(low), int(high))
    return FloatDistribution(low, high)


def _in_order(trials: list[Trial]) -> list[Trial | None]:
    """By number, as Optuna counts them; None: no such trial. Those from outside the space last."""
    numbered = {t.number: t for t in trials if t.number >= 0}
    inside: list[Trial | None] = [numbered.get(n) for n in range(max(numbered, default=-1) + 1)]
    return [*inside, *(t for t in trials if t.number < 0)]


def _frozen(
    t: Trial | None, ranges: Mapping[str, BaseDistribution], limit: int | None
) -> FrozenTrial:
    if t is None:
        return create_trial(state=TrialState.FAIL)
    values = values_of(t)
    notes = {
        "name": t.name, "kind": t.kind, "state": t.state, "fingerprint": t.fingerprint,
        "policy": json.dumps(t.policy.plain()), "nll": t.nll, "seconds": t.seconds,
        "windows": t.windows, "tokens": t.tokens, "error": t.error,
    }  # fmt: skip
    return create_trial(
        state=TrialState.COMPLETE if values else _STATES.get(t.state, TrialState.PRUNED),
        values=values,
        params=dict(t.params),
        distributions={key: ranges[key] for key in t.params},
        user_attrs={key: value for key, value in notes.items() if value is not None},
        constraints={FITS: excess(t, limit)},
    )
