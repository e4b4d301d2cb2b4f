"""The trials of a study as samplers use them, read afresh for every proposal."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from kvsearch.pareto import front
from kvsearch.search.samplers.pricing import Priced, Pricer


@dataclass(frozen=True, eq=False)
class Seen:
    """A policy that was evaluated, wholly or in part.

    Attributes:
        point: the policy's price.
        dnll: nats per token over the full cache on the whole text; None if it was stopped.
        rungs: (windows, tokens of each, dnll on them) of every prefix it was compared on.
    """

    point: Priced
    dnll: float | None
    rungs: tuple[tuple[int, int, float], ...] = ()


@dataclass
class History:
    """Trials of a study by the kind of evidence they are for a model.

    Attributes:
        done: evaluated on the whole text, one per policy, in order of their numbers.
        stopped: PRUNED by racing, with their losses on the rungs before.
        pending: RUNNING or WAITING elsewhere.
        tried: fingerprints of all trials, in any state.
    """

    done: list[Seen] = field(default_factory=list)
    stopped: list[Seen] = field(default_factory=list)
    pending: list[Priced] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)

    def front(self) -> list[Seen]:
        """Completed trials that no other dominates in (bytes, dnll), by rising bytes."""
        xy = [(float(s.point.bytes_peak), s.dnll or 0.0) for s in self.done]
        return [self.done[i] for i in front(xy)]

    def best(self) -> list[Seen]:
        """Completed trials that may be deployed, best first."""
        return sorted((s for s in self.done if s.point.feasible), key=lambda s: s.dnll or 0.0)


def read(trials: Iterable[FrozenTrial], price: Pricer, asking: int) -> History:
    """Sort `trials`, without the one numbered `asking`, for which a proposal is made.

    Directions are (dnll, bytes, ...). Trials whose parameters build no policy are left out.
    """
    out = History()
    for trial in sorted(trials, key=lambda t: t.number):
        waiting = trial.state == TrialState.WAITING
        knobs = trial.system_attrs.get("fixed_params", {}) if waiting else trial.params
        if trial.number == asking or not knobs:
            continue
        point = price.look(knobs)
        if point is None:
            continue
        known, rungs = point.fingerprint in out.tried, _rungs(trial.user_attrs.get("rungs"))
        out.tried.add(point.fingerprint)
        if waiting or trial.state == TrialState.RUNNING:
            out.pending.append(point)
        elif trial.state == TrialState.COMPLETE and isfinite(trial.values[0]):
            if not any(s.point.fingerprint == point.fingerprint for s in out.done if known):
                out.done.append(Seen(point, float(trial.values[0]), rungs))
        elif trial.state == TrialState.PRUNED and rungs:
            out.stopped.append(Seen(point, None, rungs))
    whole = {s.point.fingerprint for s in out.done}
    out.stopped = [s for s in out.stopped if s.point.fingerprint not in whole]
    out.pending = [p for p in out.pending if p.fingerprint not in whole]
    return out


def _rungs(given: Any) -> tuple[tuple[int, int, float], ...]:
    """Rungs as the driver wrote them, without those whose loss is not a finite number."""
    if not isinstance(given, Sequence):
        return ()
    return tuple((int(w), int(n), float(d)) for w, n, d in given if d is not None and isfinite(d))
