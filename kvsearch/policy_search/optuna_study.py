"""The Optuna study of a run: rebuilt in memory from the journal, the only record.

Every proposal gets a sampler of its own, seeded by the run's seed and the trial's number. A sampler
therefore depends on nothing but the study, and a run that was killed goes on as if it had not been.
"""

import warnings
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from kvsearch.errors import RunError
from kvsearch.policy_space import Axis, SearchSpace, Value
from kvsearch.results.records import Trial

MakeSampler = Callable[[int], optuna.samplers.BaseSampler]
FITS = "fits"  # the constraint: above 0 is infeasible


class Study:
    """Proposals from a sampler, and their results for the next ones.

    Args:
        space: where proposals come from.
        sampler: from a seed to a sampler.
        seed: of the run.
        limit: bytes per sequence of the budget, or None.
        speed: whether modelled decode speed is a third objective, to be maximised.

    Attributes:
        optuna_study: Optuna's own object, to be read.
    """

    def __init__(
        self,
        space: SearchSpace,
        sampler: MakeSampler,
        seed: int,
        limit: int | None,
        speed: bool = False,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        self.space, self._sampler, self._seed, self._limit = space, sampler, seed, limit
        self.optuna_study = optuna.create_study(
            directions=["minimize", "minimize", *(["maximize"] if speed else [])]
        )
        self._open: dict[int, optuna.Trial] = {}
        self._kept: dict[int, Trial] = {}  # as the study has them, by number

    @property
    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """All trials, for samplers, plots and importances."""
        return self.optuna_study.get_trials(deepcopy=False)

    @property
    def next_number(self) -> int:
        """Number of the trial that the next `ask` makes."""
        return len(self.trials)

    def ask(self, params: Mapping[str, Value] | None = None) -> tuple[optuna.Trial, dict[str, Any]]:
        """A new trial and its knobs: those of `params`, or what the sampler proposes."""
        word = f"{self._seed}/{self.next_number}".encode()
        self.optuna_study.sampler = self._sampler(int.from_bytes(sha256(word).digest()[:4]))
        if params is not None:
            self.optuna_study.enqueue_trial(dict(params))
        trial = self.optuna_study.ask()
        self._open[trial.number] = trial
        return trial, self.space.suggest(trial)

    def tell(self, done: Trial) -> None:
        """How a trial ended. Failed ones are PRUNED, never an invented value."""
        trial = self._open.pop(done.number)
        trial.set_constraint(FITS, excess(done, self._limit))
        if values_of(done) is None:
            self.optuna_study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.optuna_study.tell(trial, values_of(done))

    def renew(self, trials: list[Trial]) -> None:
        """Bring trials up to date, and add those of an earlier process.

        Optuna never changes a trial that has ended, but the loss of a policy changes with further
        windows. A study made anew for each change would cost as much as it has trials, so the
        changed ones are overwritten where the storage holds them.
        """
        self.restore([t for t in trials if t.number >= self.next_number])
        known = self.trials
        for t in trials:
            if t.number >= 0 and t.state != "running" and self._kept.get(t.number) is not t:
                old, new = known[t.number], self._frozen(t)
                old.state, old.values = new.state, new.values
                old.params, old.distributions = new.params, new.distributions
                old.user_attrs, old.system_attrs = new.user_attrs, new.system_attrs
                self._kept[t.number] = t

    def restore(self, trials: list[Trial]) -> None:
        """Bring back trials of an earlier process, running ones included, in order of number.

        Raises:
            RunError: a trial has values that this space or these objectives do not have.
        """
        for t in sorted(trials, key=lambda t: t.number):
            if t.number < 0:
                continue
            while self.next_number < t.number:  # a line that was removed by hand: keep its number
                self.optuna_study.add_trial(
                    optuna.trial.create_trial(
                        state=optuna.trial.TrialState.PRUNED, constraints={FITS: 1.0}
                    )
                )
            if t.state == "running":
                self.ask(t.params)
                continue
            try:
                self.optuna_study.add_trial(self._frozen(t))
            except (KeyError, ValueError) as e:
                why = f"no axis {e}" if isinstance(e, KeyError) else str(e)
                raise RunError(
                    f"trial {t.number} in trials.jsonl is none of this run's ({why:.200}); mend or "
                    "remove its lines"
                ) from e
            self._kept[t.number] = t

    def _frozen(self, t: Trial) -> optuna.trial.FrozenTrial:
        """A trial that has ended, as Optuna keeps it."""
        values, state = values_of(t), optuna.trial.TrialState
        return optuna.trial.create_trial(
            state=state.COMPLETE if values else state.PRUNED,
            values=values,
            params=t.params,
            distributions={k: _distribution(self.space.axes[k]) for k in t.params},
            system_attrs=dict(t.system),  # Optuna adds to it
            constraints={FITS: excess(t, self._limit)},
        )


def excess(done: Trial, limit: int | None) -> float:
    """Bytes over the budget `limit` as a share of it; 1 of a trial that cannot be deployed."""
    if done.state in ("rejected", "failed") or done.bytes_peak is None:
        return 1.0
    return 0.0 if limit is None else done.bytes_peak / limit - 1.0


def values_of(done: Trial) -> list[float] | None:
    """Its objectives, if it was measured."""
    if done.dnll is None or done.bytes_peak is None:
        return None
    values = [done.dnll, float(done.bytes_peak)]
    return values if done.speed is None else [*values, done.speed]


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.choice is not None:
        return CategoricalDistribution(axis.choice)
    if axis.int_ is not None:
        low, high, step = axis.int_
        return IntDistribution(low, high, log=axis.log, step=step)
    assert axis.float_ is not None
    return FloatDistribution(*axis.float_, log=axis.log)
