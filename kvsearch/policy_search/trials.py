"""The records of a search: trials, the losses of the full cache, windows measured ahead, the study.

The measurements of a trial are on disk before Optuna has them, so a kill costs only the evaluations
under way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvsearch.policy import Policy
from kvsearch.policy_search.admission import Task
from kvsearch.policy_search.fixed_list import PART
from kvsearch.policy_search.job_loop import Evaluation
from kvsearch.policy_search.optuna_study import Study
from kvsearch.policy_search.prefetch import PrefetchedWindows
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Trial

Watch = Callable[[Trial, list[Trial]], None]


class SearchState:
    """What a search has found so far, in memory and in its folder.

    Args:
        task: what to do.
        folder: where everything is kept.
        watch: called with every finished trial, and all of them.
        running: evaluations under way, by slot; the loop changes it.

    Attributes:
        trials: that have ended.
        interrupted: trials that were under way when an earlier process was killed.
        study: of Optuna.
        full: NLL of the full cache `[windows, T - 1]`, as far as it is measured.
        misses: proposals that needed no evaluation.
        unfetched: fingerprints of policies of which no window is prefetched any more.
    """

    def __init__(
        self, task: Task, folder: RunFolder, watch: Watch, running: Mapping[int, Evaluation]
    ) -> None:
        self.task, self.folder, self.watch, self.running = task, folder, watch, running
        self.trials = folder.trials()
        self.interrupted = folder.running()
        self.full = np.empty((0, 0), dtype=np.float32)
        self.full_policy = Policy(name="full")
        self.full_key = self.full_policy.fingerprint(task.setting.shape.layers)
        self.misses = sum(t.state in ("rejected", "duplicate") for t in self.trials)
        self.unfetched: set[str] = set()
        budget = task.setting.budget_bytes
        self.study = Study(task.space, task.sampler, task.seed, budget, task.speed is not None)
        self._pieces = PrefetchedWindows(folder, PART)
        self._waiting: list[Trial] = []  # measured before the full cache was
        self._stale = True
        self.renew()

    def restore(self) -> None:
        """Take up the full cache as far as it is measured, and windows that were prefetched."""
        if self.folder.has_nll(PART, self.full_key):
            self.full = self._load(self.full_key).nll
        self._pieces.restore()
        self._join_full()

    def renew(self) -> None:
        """Give Optuna all trials anew if losses changed."""
        if not self._stale:
            return
        self.study.renew([*self.trials, *self.interrupted, *self.under_way()])
        self._stale = False

    def clear(self) -> None:
        """Forget windows that were prefetched and not needed."""
        self._pieces.clear()

    # -- what is known -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Windows that a policy starts with, and gets at a time."""
        return min(self.task.together, self.task.windows)

    def under_way(self) -> list[Trial]:
        """Trials that are evaluated for the first time."""
        running = [e.trial for e in self.running.values() if e.trial is not None and not e.first]
        return [*self._waiting, *running]

    def twin(self, fingerprint: str) -> Trial | None:
        """The trial of the same policy that is, was or will be evaluated."""
        return next(
            (
                t
                for t in [*self.trials, *self.under_way(), *self.interrupted]
                if t.fingerprint == fingerprint and t.state in ("complete", "running", "failed")
            ),
            None,
        )

    def attempts(self, trial: Trial) -> int:
        """How often the policy of a trial was begun without an end."""
        return self.folder.attempts.of(PART, trial.fingerprint)

    def covered(self) -> dict[int, int]:
        """First window of every trial that is neither measured nor under way, by its number."""
        running = self._running_windows()
        ended = {
            t.number: self._next_window(t.fingerprint, t.windows, running) for t in self.trials
        }
        return ended | {
            t.number: self._next_window(t.fingerprint, self.step, running) for t in self.under_way()
        }

    def covered_full(self) -> int:
        """The same of the full cache."""
        return self._next_window(self.full_key, len(self.full), self._running_windows())

    def _running_windows(self) -> dict[str, set[int]]:
        """First windows of what is under way, by fingerprint."""
        found: dict[str, set[int]] = {}
        for e in self.running.values():
            found.setdefault(e.fingerprint, set()).add(e.first)
        return found

    def _next_window(self, key: str, windows: int, running: Mapping[str, set[int]]) -> int:
        there = running.get(key, set()) | self._pieces.firsts(key)
        while windows in there:
            windows += self.step
        return min(windows, self.task.windows)

    # -- what was measured ---------------------------------------------------------------------

    def begin(self, trial: Trial, attempt: int) -> Trial:
        """Write the journal line of a trial's start; the trial with the number of the attempt."""
        begun = replace(trial, attempt=attempt)
        self.folder.append(begun)
        return begun

    def add(self, trial: Trial, found: Measurement) -> None:
        """Finish a trial on its first windows."""
        self.folder.save_nll(PART, trial.fingerprint, found, trial.name)
        self._complete(trial, found)

    def add_windows(self, e: Evaluation, found: Measurement) -> None:
        """Keep further windows, and put together what has become complete by them."""
        self._pieces.add(e.fingerprint, e.first, found)
        if e.trial is None:
            self._join_full()
        else:
            self._join(e.fingerprint)
        self._pieces.save(e.fingerprint)

    def recover(self, e: Evaluation) -> bool:
        """Finish a trial whose NLL was saved just before a kill; whether there was one."""
        if e.trial is None or not self.folder.has_nll(PART, e.fingerprint):
            return False
        found = self._load(e.fingerprint)
        if len(found.nll) < e.first + e.windows:
            return False
        if e.first:
            self._replace(self._record(e.trial, found))
        else:
            self._complete(e.trial, found)
        self.folder.attempts.end(PART, e.fingerprint)
        return True

    def fail(self, trial: Trial, error: str, seconds: float) -> None:
        """Finish a trial without a measurement."""
        self.finish(replace(trial, state="failed", error=error, seconds=seconds))

    def fail_windows(self, trial: Trial, error: str) -> None:
        """A trial that was complete and failed on further windows; it counts no longer."""
        self._pieces.drop(trial.fingerprint)
        self._replace(replace(trial, state="failed", error=error, nll=None, dnll=None))

    def finish(self, trial: Trial) -> None:
        """A finished trial goes to the journal, then to Optuna's study, then to `watch`."""
        self.folder.append(trial)
        self.trials.append(trial)
        if trial.number >= 0:
            self.study.tell(trial)
        self.misses += trial.state in ("rejected", "duplicate")
        self.watch(trial, self.trials)
        self._join(trial.fingerprint)

    def _complete(self, trial: Trial, found: Measurement) -> None:
        """Finish a trial on its first windows; without the full cache there, it has to wait."""
        if len(found.nll) > len(self.full):
            self._waiting.append(trial)
            return
        self.finish(self._record(trial, found))

    def _record(self, trial: Trial, found: Measurement) -> Trial:
        """A complete trial with what follows from all that was measured of it."""
        nll, start = found.nll, self.task.score_from - 1
        full = self.full[: len(nll), start : nll.shape[1]]
        return replace(
            trial,
            state="complete",
            nll=float(nll[:, start:].mean()),
            dnll=float((nll[:, start:] - full).mean()),
            windows=len(nll),
            tokens=found.tokens,
            seconds=found.seconds,
        )

    def _replace(self, trial: Trial) -> None:
        """A trial that was complete and has more windows, or failed there, in its old place."""
        self.folder.append(trial)
        self.trials[[t.number for t in self.trials].index(trial.number)] = trial
        self._stale = True

    # -- windows measured ahead ----------------------------------------------------------------

    def _join_full(self) -> None:
        """The full cache has more windows; policies that waited for them go on."""
        windows = len(self.full)
        new = self._pieces.following(self.full_key, windows, self.task.windows)
        if new:
            before = [self._load(self.full_key)] if windows else []
            self.full = self._joined(self.full_key, [*before, *new], "full").nll
        for key in self._pieces.fingerprints:
            self._join(key)
        waiting, self._waiting = self._waiting, []
        for trial in waiting:
            self._complete(trial, self._load(trial.fingerprint))

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
        before = self._load(key).until(trial.windows)  # a kill may have left more than the journal
        before = replace(before, tokens=trial.tokens, seconds=trial.seconds or 0.0)
        self._replace(self._record(trial, self._joined(key, [before, *new], trial.name)))

    def _joined(self, key: str, parts: Sequence[Measurement], name: str) -> Measurement:
        """Save the parts of a record that follow on each other as one; returns it."""
        whole = Measurement.joined(parts)
        self.folder.save_nll(PART, key, whole, name)
        self._pieces.drop(key, before=len(whole.nll))
        return whole

    def _load(self, fingerprint: str) -> Measurement:
        return self.folder.load_nll(PART, fingerprint)
