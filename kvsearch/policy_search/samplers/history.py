"""The trials of a study as samplers use them, read afresh for every proposal."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite

from optuna.trial import FrozenTrial, TrialState

from kvsearch.policy_search.samplers.pricing import Context, Priced
from kvsearch.results.pareto import front


@dataclass(frozen=True, eq=False)
class Seen:
    """A policy that was evaluated.

    Attributes:
        point: the policy's price.
        dnll: loss over the full cache.
    """

    point: Priced
    dnll: float


@dataclass
class History:
    """Trials of a study by the kind of evidence they are for a model.

    Attributes:
        done: evaluated on the whole text, one per policy, in order of their numbers.
        pending: RUNNING or WAITING elsewhere.
        tried: fingerprints of all trials, in any state.
    """

    done: list[Seen] = field(default_factory=list)
    pending: list[Priced] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)

    def front(self) -> list[Seen]:
        """Completed trials that no other dominates in (bytes, dnll), by rising bytes."""
        xy = [(float(s.point.bytes_peak), s.dnll) for s in self.done]
        return [self.done[i] for i in front(xy)]

    def best(self) -> list[Seen]:
        """Completed trials that may be deployed, best first."""
        return sorted((s for s in self.done if s.point.feasible), key=lambda s: s.dnll)


def read(trials: Iterable[FrozenTrial], context: Context, asking: int) -> History:
    """Sort `trials`, without the one numbered `asking`, for which a proposal is made.

    Directions are (dnll, bytes, ...). Trials whose parameters build no policy are left out.
    """
    out = History()
    for trial in sorted(trials, key=lambda t: t.number):
        waiting = trial.state == TrialState.WAITING
        knobs = trial.system_attrs.get("fixed_params", {}) if waiting else trial.params
        if trial.number == asking or not knobs:
            continue
        point = context.look(knobs)
        if point is None:
            continue
        known = point.fingerprint in out.tried
        out.tried.add(point.fingerprint)
        if waiting or trial.state == TrialState.RUNNING:
            out.pending.append(point)
        elif trial.state == TrialState.COMPLETE and isfinite(trial.values[0]):
            known = known and any(s.point.fingerprint == point.fingerprint for s in out.done)
            if not known:
                out.done.append(Seen(point, float(trial.values[0])))
    whole = {s.point.fingerprint for s in out.done}
    out.pending = [p for p in out.pending if p.fingerprint not in whole]
    return out
