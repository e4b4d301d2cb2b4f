"""Which policy is measured on further windows next (`fidelity`).

Idle evaluators prefetch windows: several of one policy at once, before those in front of them have
ended, and windows that are only likely to be needed. A prefetched window is never a reason to give
a policy up: if it fails, it is forgotten, and measured again when it is the policy's next one.

One evaluator is never without a job while another has one, so it prefetches nothing.
"""

from collections.abc import Mapping

from kvsearch.policy_search import fidelity
from kvsearch.policy_search.fixed_list import GIVEN_UP, PART
from kvsearch.policy_search.job_loop import Evaluation
from kvsearch.policy_search.pacing import Pacing
from kvsearch.policy_search.trials import SearchState
from kvsearch.results.attempts import ATTEMPTS
from kvsearch.results.records import Trial

RANKS = 12  # ranks of policies from which an evaluator without a job takes a window, see `likely`
LEVEL_RANKS = 2  # the same when nothing but the last windows of contenders is under way


class WindowScheduler:
    """Further windows of the trials of a search.

    Args:
        state: of the search.
        pacing: of the free proposals that the windows alternate with.
        slots: evaluators.
    """

    def __init__(self, state: SearchState, pacing: Pacing, slots: int) -> None:
        self.state, self.pacing, self.slots = state, pacing, slots

    def due(self) -> Evaluation | None:
        """A contender on further windows, if they are due; or the full cache there.

        Free proposals and further windows alternate. When there are no more proposals, contenders
        get windows until all have as many as any policy, contender or not: who once was one may
        have the most windows, and only policies with the most are chosen.
        """
        state, covered = self.state, self.state.covered()
        if self.pacing.wanted():
            most = state.task.windows
            if self.pacing.waits() or self._given(covered) >= self.pacing.made():
                return None
        else:
            most = self._most(covered)
        trial = fidelity.least_measured(state.trials, self._limit, most, self._open(covered))
        if trial is None:
            return None
        first = covered[trial.number]
        if first == trial.windows and state.attempts(trial) >= ATTEMPTS:
            state.fail_windows(trial, GIVEN_UP)
            return self.due()
        return self._further(trial, first)

    def prefetch(self) -> Evaluation | None:
        """For an evaluator without a job: the window that is most likely to be needed."""
        state, under_way = self.state, list(self.state.running.values())
        if not under_way:
            return None
        further = len(under_way) - sum(e.trial is not None and not e.first for e in under_way)
        if further >= self.slots - self.pacing.reserved(self.slots):
            return None
        covered, running = state.covered(), state.under_way()
        wanted = self.pacing.wanted()
        waits = wanted or running
        if not waits and not any(e.due for e in under_way):
            return None  # the search has ended but for what is under way
        most = state.task.windows if wanted else self._most(covered)
        trial = fidelity.likely(
            state.trials, running, self._limit, most, self._open(covered),
            RANKS if waits else LEVEL_RANKS,
        )  # fmt: skip
        if trial is None:
            return None
        return self._further(trial, covered[trial.number], due=False)

    def full(self, first: int, number: int) -> Evaluation:
        """The full cache on the windows from `first` on."""
        state = self.state
        return Evaluation(
            policy=state.full_policy, fingerprint=state.full_key, counted=False, part=PART,
            number=number, first=first, windows=self._step(first),
        )  # fmt: skip

    def _further(self, trial: Trial, first: int, due: bool = True) -> Evaluation:
        """A trial on the windows from `first` on, or the full cache if it is not there yet."""
        state = self.state
        full = state.covered_full()
        if full < min(first + state.step, state.task.windows):
            return self.full(full, trial.number)
        ahead = first > trial.windows
        return Evaluation(
            policy=trial.policy, fingerprint=trial.fingerprint, trial=trial, part=PART,
            number=trial.number, first=first, windows=self._step(first),
            piece=ahead, tries=1 if ahead else ATTEMPTS, due=due,
        )  # fmt: skip

    def _step(self, first: int) -> int:
        """Windows of one evaluation from a window on."""
        return min(self.state.step, self.state.task.windows - first)

    @property
    def _limit(self) -> int | None:
        return self.state.task.setting.budget_bytes

    def _open(self, covered: Mapping[int, int]) -> dict[int, int]:
        """Covered windows, but all of them for a policy that must not be prefetched now."""
        state = self.state
        trials = [*state.trials, *state.under_way()] if state.unfetched else []
        held = [
            t for t in trials if t.fingerprint in state.unfetched and t.windows < covered[t.number]
        ]
        return {**covered, **{t.number: state.task.windows for t in held}}

    def _most(self, covered: Mapping[int, int]) -> int:
        """The most windows of a complete trial."""
        done = (t for t in self.state.trials if t.state == "complete")
        return max((covered[t.number] for t in done), default=0)

    def _given(self, covered: Mapping[int, int]) -> int:
        """How often a policy was given further windows, prefetched or not."""
        step = self.state.step
        twins = {t.number for t in self.state.trials if t.state == "duplicate"}
        rest = [max(0, w - step) for n, w in covered.items() if n not in twins]
        return sum(-(-r // step) for r in rest)
