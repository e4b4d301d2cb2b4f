"""The part of a search that measures policies on further windows (`growing`).

Whose turn it is follows from the trials. Evaluators that would have nothing to do measure windows
*ahead*: several of one policy at once, before those in front of them have ended, and windows that
are only likely to be needed. A window ahead of its turn is never a reason to give a policy up: if
it fails, it is forgotten, and comes again when it is the policy's next one.

One evaluator is never without a job while another has one, so it measures nothing ahead.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import Policy
from kvsearch.policy_search import growing
from kvsearch.policy_search.attempts import ATTEMPTS
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.loop import Evaluation, Loop
from kvsearch.policy_search.measure import GIVEN_UP, PART
from kvsearch.policy_search.pieces import Piece, Pieces
from kvsearch.policy_search.task import Task
from kvsearch.policy_search.turns import FullEvaluation, TrialEvaluation, WiderEvaluation
from kvsearch.policy_search.work import Measured
from kvsearch.records import Trial

RANKS = 12  # ranks of policies from which an evaluator without a job takes a window, see `likely`
LEVEL_RANKS = 2  # the same when nothing but the last windows of contenders is under way


class Widening(Loop[Evaluation]):
    """Further windows of the trials of a task.

    Args:
        task: what to do.
        executor: where evaluations run; the caller closes it.
        folder: where everything is kept.
        trials: that have ended.
    """

    def __init__(
        self, task: Task, executor: Executor, folder: RunFolder, trials: list[Trial]
    ) -> None:
        super().__init__(executor, folder)
        self.task, self.trials = task, trials
        self.full = np.empty((0, 0), dtype=np.float32)
        self._full_policy = Policy(name="full")
        self._full_key = self._full_policy.fingerprint(task.setting.shape.layers)
        self._pieces = Pieces(folder, PART)
        self._alone: set[str] = set()  # fingerprints of which nothing more is measured ahead

    # -- what the rest of a search says --------------------------------------------------------

    @abstractmethod
    def _wanted(self) -> bool:
        """Whether another free proposal should be started."""

    @abstractmethod
    def _waits(self) -> bool:
        """Whether such a proposal waits."""

    @abstractmethod
    def _kept_free(self) -> int:
        """Evaluators that measure no further windows now."""

    @abstractmethod
    def _proposed(self) -> int:
        """Free proposals that are evaluated, or were."""

    @abstractmethod
    def _under_way(self) -> list[Trial]:
        """Trials that are evaluated for the first time."""

    @abstractmethod
    def _record(self, trial: Trial, nll: NDArray[np.float32]) -> Trial:
        """A complete trial with the losses that follow from its NLL."""

    @abstractmethod
    def _replace(self, trial: Trial) -> None:
        """Write down that a trial that was complete has changed."""

    # -- whose turn it is ----------------------------------------------------------------------

    def _wider(self) -> Evaluation | None:
        """A contender on further windows, if it is the turn of one; or the full cache there.

        Free proposals and further windows take turns. When there are no more proposals, contenders
        get windows until all have as many as any policy, contender or not: who once was one may
        have the most windows, and only policies with the most are chosen.
        """
        covered = self._covered()
        if self._wanted():
            most = self.task.windows
            if self._waits() or self._turns(covered) >= self._proposed():
                return None
        else:
            most = self._most(covered)
        trial = growing.least_measured(self.trials, self._limit, most, self._open(covered))
        if trial is None:
            return None
        first = covered[trial.number]
        if first == trial.windows and self._attempts(PART, trial) >= ATTEMPTS:
            self._lost(trial, GIVEN_UP)
            return self._wider()
        return self._further(trial, first)

    def _ahead(self) -> Evaluation | None:
        """For an evaluator without a job: the window that is most likely to be needed."""
        if not self.running:
            return None
        first = sum(type(e) is TrialEvaluation for e in self.running.values())
        if len(self.running) - first >= self.executor.slots - self._kept_free():
            return None
        covered, running = self._covered(), self._under_way()
        waits = self._wanted() or running
        if not waits and not any(getattr(e, "due", True) for e in self.running.values()):
            return None  # the search has ended but for what is under way
        most = self.task.windows if self._wanted() else self._most(covered)
        trial = growing.likely(
            self.trials, running, self._limit, most, self._open(covered),
            RANKS if waits else LEVEL_RANKS,
        )  # fmt: skip
        if trial is None:
            return None
        return self._further(trial, covered[trial.number], due=False)

    def _further(self, trial: Trial, first: int, due: bool = True) -> Evaluation:
        """A trial on the windows from `first` on, or the full cache if it is not there yet."""
        t = self.task
        full = self._next_window(self._full_key, len(self.full), self._flying())
        if full < min(first + self._first, t.windows):
            return self._full_from(full, trial.number)
        ahead = first > trial.windows
        return WiderEvaluation(
            policy=trial.policy, fingerprint=trial.fingerprint, trial=trial, part=PART,
            number=trial.number, first=first, windows=self._step(first), stop=self._tokens,
            piece=ahead, tries=1 if ahead else ATTEMPTS, due=due,
        )  # fmt: skip

    def _full_from(self, first: int, number: int) -> FullEvaluation:
        """The full cache on the windows from `first` on."""
        return FullEvaluation(
            policy=self._full_policy, fingerprint=self._full_key, counted=False, part=PART,
            number=number, first=first, windows=self._step(first), stop=self._tokens,
        )  # fmt: skip

    def _step(self, first: int) -> int:
        """Windows of one evaluation from a window on."""
        return min(self._first, self.task.windows - first)

    @property
    def _tokens(self) -> int:
        return self.task.setting.tokens

    @property
    def _first(self) -> int:
        """Windows that a policy starts with, and gets at a time."""
        return min(self.task.together, self.task.windows)

    @property
    def _limit(self) -> int | None:
        return self.task.setting.budget_bytes

    # -- who has how many ----------------------------------------------------------------------

    def _flying(self) -> dict[str, set[int]]:
        """First windows of what is under way, by fingerprint."""
        found: dict[str, set[int]] = {}
        for e in self.running.values():
            found.setdefault(e.fingerprint, set()).add(e.first)
        return found

    def _next_window(self, key: str, windows: int, flying: Mapping[str, set[int]]) -> int:
        """The first window of a policy that is not measured, under way or waiting."""
        there = flying.get(key, set()) | self._pieces.firsts(key)
        while windows in there:
            windows += self._first
        return min(windows, self.task.windows)

    def _covered(self) -> dict[int, int]:
        """`_next_window` of all trials, by number."""
        flying = self._flying()
        ended = {t.number: self._next_window(t.fingerprint, t.windows, flying) for t in self.trials}
        return ended | {
            t.number: self._next_window(t.fingerprint, self._first, flying)
            for t in self._under_way()
        }

    def _open(self, covered: Mapping[int, int]) -> dict[int, int]:
        """The same, but a policy of which nothing is measured ahead has all until its turn."""
        trials = [*self.trials, *self._under_way()] if self._alone else []
        held = [t for t in trials if t.fingerprint in self._alone and t.windows < covered[t.number]]
        return {**covered, **{t.number: self.task.windows for t in held}}

    def _most(self, covered: Mapping[int, int]) -> int:
        """The most windows of a complete trial."""
        return max((covered[t.number] for t in self.trials if t.state == "complete"), default=0)

    def _turns(self, covered: Mapping[int, int]) -> int:
        """How often a policy was given further windows, ahead of its turn or not."""
        twins = {t.number for t in self.trials if t.state == "duplicate"}
        rest = [max(0, w - self._first) for n, w in covered.items() if n not in twins]
        return sum(-(-r // self._first) for r in rest)

    # -- what comes of it ----------------------------------------------------------------------

    def _widened(self, e: Evaluation, found: Measured) -> None:
        """Keep further windows, and put together what has become complete by them."""
        self._pieces.add(e.fingerprint, e.first, Piece(found.nll, e.tokens, e.seconds))
        if isinstance(e, WiderEvaluation):
            self._join(e.fingerprint)
        else:
            self._join_full()
        self._pieces.save(e.fingerprint)

    def _join_full(self) -> None:
        """The full cache has more windows; policies that waited for them go on."""
        windows = len(self.full)
        new = self._pieces.following(self._full_key, windows, self.task.windows)
        if new:
            self.full = self._joined(self._full_key, windows, new, {"name": "full"})
        for key in self._pieces.fingerprints:
            self._join(key)

    def _join(self, key: str) -> None:
        """Add to a complete trial the windows that follow on its own, where the full cache is."""
        ended = (t for t in self.trials if t.fingerprint == key)
        trial = next((t for t in ended if t.state in ("complete", "failed")), None)
        if trial is None:
            return  # it is measured for the first time, or is the full cache
        if trial.state == "failed":
            self._pieces.drop(key)
            return
        new = self._pieces.following(key, trial.windows, len(self.full))
        if not new:
            return
        tokens = trial.tokens + sum(p.tokens for p in new)
        seconds = (trial.seconds or 0.0) + sum(p.seconds for p in new)
        about = {"name": trial.name, "tokens": tokens, "seconds": seconds}
        nll = self._joined(key, trial.windows, new, about)
        self._replace(self._record(replace(trial, tokens=tokens, seconds=seconds), nll))

    def _joined(
        self, key: str, windows: int, new: list[Piece], about: dict[str, Any]
    ) -> NDArray[np.float32]:
        """Save a record of so many windows with further ones behind them; returns all."""
        before = [self._load(key)[:windows]] if windows else []
        nll = np.concatenate([*before, *(p.nll for p in new)])
        self.folder.save_nll(PART, key, nll, about)
        self._pieces.drop(key, before=len(nll))
        return nll

    def _unwidened(self, e: WiderEvaluation, error: str) -> None:
        """No measurement: a policy counts no longer, or gets nothing ahead of its turn."""
        if e.piece:
            self._alone.add(e.fingerprint)
        else:
            self._lost(e.trial, f"on further windows: {error}")

    def _lost(self, trial: Trial, error: str) -> None:
        """A trial that was complete and failed on further windows; it counts no longer."""
        self._pieces.drop(trial.fingerprint)
        self._replace(replace(trial, state="failed", error=error, nll=None, dnll=None))

    def _attempts(self, kept: str, trial: Trial) -> int:
        return self.folder.attempts.of(kept, trial.fingerprint)

    def _load(self, fingerprint: str) -> NDArray[np.float32]:
        return self.folder.load_nll(PART, fingerprint)[0]
