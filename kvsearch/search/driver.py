"""The search: one driver owns the study, evaluators only evaluate.

The measurements of a trial are on disk before Optuna has them, so a kill costs only the evaluations
under way. A policy over budget costs nothing: its bytes are exact. A policy seen before gets the
values it had then.

With growing windows (`growing`), a free proposal and one more window for a contender follow each
other in turn. What comes next depends on the trials only, which are in the journal.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.knobs import Value
from kvsearch.policy import Policy
from kvsearch.records import Kind, Trial
from kvsearch.search import growing, race
from kvsearch.search.attempts import ATTEMPTS
from kvsearch.search.executors import Executor
from kvsearch.search.folder import RunFolder
from kvsearch.search.loop import Evaluation, Loop
from kvsearch.search.measure import GIVEN_UP, PART, measure
from kvsearch.search.rivals import Rivals
from kvsearch.search.study import Study
from kvsearch.search.task import KINDS, Task, admitted, baselines
from kvsearch.search.turns import FullEvaluation, TrialEvaluation, WiderEvaluation, waits
from kvsearch.search.work import Measured

HOPELESS = 5  # failures in a row, without one success, that end a run

Watch = Callable[[Trial, list[Trial]], None]


class Search(Loop[Evaluation]):
    """Runs a task in a folder, and picks up where an earlier run of it stopped.

    Args:
        task: what to do.
        executor: where evaluations run; the caller closes it.
        folder: where everything is kept.
        watch: called with every finished trial, and all of them.
    """

    def __init__(self, task: Task, executor: Executor, folder: RunFolder, watch: Watch) -> None:
        super().__init__(executor, folder)
        self.task, self.watch = task, watch
        self.trials = [_dated(t, task.windows) for t in folder.trials()]
        budget = task.setting.budget_bytes
        self.study = Study(task.space, task.sampler, task.seed, budget, task.speed is not None)
        self._interrupted = folder.running()
        self._stale = True
        self._renew()
        self._rivals = Rivals(task.score_from, self._load)
        known = {t.name for t in [*self.trials, *self._interrupted]}
        methods = [*task.portfolio, *baselines(task.warm_start, task.exclude_method)]
        self._methods = [(n, m) for n, m in methods if n not in known]
        self._misses = sum(t.state in ("rejected", "duplicate") for t in self.trials)

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        self.prepare()
        self.drive()
        self._renew()
        return self.trials

    def prepare(self) -> None:
        """Measure the full cache, the reference of every comparison."""
        full = Policy(name="full")
        measure(
            self.executor, self.folder, PART, [full], self.task.setting, resident=False,
            windows=self._first if self.task.growing else self.task.windows,
            together=self.task.together,
        )  # fmt: skip
        self.full = self._load(full.fingerprint(self.task.setting.shape.layers))

    # -- what comes next -----------------------------------------------------------------------

    def next(self) -> Evaluation | None:
        """The next evaluation that is needed, or None when there is nothing to start now."""
        while True:
            if self._interrupted:
                trial = self._again(self._interrupted.pop(0))
            elif self._methods:
                name, method = self._methods.pop(0)
                trial = self._method(name, KINDS[method.kind], method.knobs)
            elif (wider := self._wider()) is not None:
                if isinstance(wider, WiderEvaluation) and self._known(wider):
                    continue
                return wider
            elif self._wanted() and not self._waits():
                self._renew()
                asked, knobs = self.study.ask()
                trial = self._check(asked, f"trial {asked.number}", "searched", knobs)
            else:
                return None
            if trial is None:
                continue
            evaluation = self._evaluation(trial)
            if not self._known(evaluation):
                return evaluation

    def _wider(self) -> Evaluation | None:
        """A contender on further windows, if it is the turn of one; or the full cache there.

        Free proposals and further windows take turns. When there are no more proposals, contenders
        get windows until all have as many as any policy, contender or not: who once was one may
        have the most windows, and only policies with the most are chosen.
        """
        if not self.task.growing:
            return None
        t, busy = self.task, [e for e in self.running.values() if isinstance(e, WiderEvaluation)]
        most = t.windows
        if not self._wanted():
            most = max((c.windows for c in self.trials if c.state == "complete"), default=0)
        elif self._turns(busy) >= self._proposed() and not self._waits():
            return None
        limit, numbers = t.setting.budget_bytes, [e.number for e in busy]
        trial = growing.least_measured(self.trials, limit, most, numbers)
        if trial is None:
            return None
        if self.folder.attempts.of(PART, trial.fingerprint) >= ATTEMPTS:
            self._lost(trial, GIVEN_UP)
            return self._wider()
        common: dict[str, Any] = {"part": PART, "number": trial.number, "first": trial.windows}
        width = min(self._first, t.windows - trial.windows)
        common["rungs"] = ((width, t.setting.tokens),)
        if len(self.full) < trial.windows + width:
            if any(isinstance(e, FullEvaluation) for e in self.running.values()):
                return None
            full = Policy(name="full")
            key = full.fingerprint(t.setting.shape.layers)
            if self._on_disk(key) >= trial.windows + width:  # a kill came after it was saved
                self.full = self._load(key)
            else:
                return FullEvaluation(policy=full, fingerprint=key, counted=False, **common)
        return WiderEvaluation(
            policy=trial.policy, fingerprint=trial.fingerprint, trial=trial, **common
        )

    def _turns(self, busy: list[WiderEvaluation]) -> int:
        """How often a policy was given further windows."""
        rest = [max(0, t.windows - self._first) for t in self.trials if t.state != "duplicate"]
        return sum(-(-r // self._first) for r in rest) + len(busy)

    def _proposed(self) -> int:
        """Free proposals that are evaluated, or were."""
        spent = sum(
            t.kind == "searched" and t.state in ("complete", "pruned", "failed")
            for t in self.trials
        )
        return spent + sum(t.kind == "searched" for t in self._under_way())

    @property
    def _first(self) -> int:
        """Windows that a policy starts with, and gets at a time."""
        return min(self.task.together, self.task.windows)

    def _wanted(self) -> bool:
        """Whether another free proposal should be started."""
        more = self._proposed() < self.task.trials
        return more and self._misses < 50 * (self.task.trials + 1)

    def _waits(self) -> bool:
        kinds = [t.kind for t in self._under_way()]
        return waits(kinds, self.task.trials - self._proposed())

    def _again(self, before: Trial) -> Trial | None:
        """A trial that was under way when the driver or its evaluator was killed."""
        killed = self.folder.attempts.of(PART, before.fingerprint) >= ATTEMPTS
        if not killed or self.folder.has_nll(PART, before.fingerprint):
            return before  # if it was killed after its NLL was saved, `_known` finishes it
        self._finish(replace(before, state="failed", error=GIVEN_UP))
        return None

    def _method(self, name: str, kind: Kind, knobs: Mapping[str, Value]) -> Trial | None:
        params = self.task.space.params(knobs)
        if params is not None:
            asked, knobs = self.study.ask(params)
            return self._check(asked, name, kind, knobs)
        numbers = [t.number for t in [*self.trials, *self._under_way()]]
        return self._check(min([0, *numbers]) - 1, name, kind, knobs)  # not in Optuna's study

    def _check(
        self, asked: optuna.Trial | int, name: str, kind: Kind, knobs: Mapping[str, Value]
    ) -> Trial | None:
        """A proposal that needs an evaluation; others are finished here."""
        inside = isinstance(asked, optuna.Trial)
        number = asked.number if isinstance(asked, optuna.Trial) else asked
        system = self.study.trials[number].system_attrs if inside else {}
        noted = {k: v for k, v in system.items() if k != "fixed_params"}
        trial = admitted(self.task, number, name, kind, knobs, noted)
        if trial.state == "rejected":
            self._finish(trial)
            return None
        twin = self._twin(trial.fingerprint)
        if twin is not None and twin.state == "failed":  # it may have killed its evaluator
            error = f"same policy as {twin.name}, which failed"
            self._finish(replace(trial, state="rejected", error=error))
            return None
        if twin is not None:
            same: dict[str, Any] = {
                k: getattr(twin, k) for k in ("nll", "dnll", "rungs", "windows")
            }
            error = f"same policy as {twin.name}"
            self._finish(replace(trial, state="duplicate", error=error, **same))
            return None
        return trial

    def _twin(self, fingerprint: str) -> Trial | None:
        return next(
            (
                t
                for t in [*self.trials, *self._under_way(), *self._interrupted]
                if t.fingerprint == fingerprint
                and t.state in ("complete", "pruned", "running", "failed")
            ),
            None,
        )

    def _under_way(self) -> list[Trial]:
        """Trials that are evaluated for the first time."""
        first = (e for e in self.running.values() if not isinstance(e, WiderEvaluation))
        return [e.trial for e in first if isinstance(e, TrialEvaluation)]

    def _evaluation(self, trial: Trial) -> TrialEvaluation:
        t = self.task
        looks = race.rungs(t.setting.tokens, t.windows, t.together)
        if t.growing:
            looks = looks[:1]
        return TrialEvaluation(
            number=trial.number, part=PART, policy=trial.policy, fingerprint=trial.fingerprint,
            rungs=looks if t.racing else looks[-1:], trial=trial,
        )  # fmt: skip

    def _known(self, e: TrialEvaluation) -> bool:
        """Finish a trial whose NLL was saved just before a kill."""
        windows = e.rungs[-1][0] or self.task.windows
        if self._on_disk(e.fingerprint) < e.first + windows:
            return False
        nll, about = self.folder.load_nll(PART, e.fingerprint)
        e.tokens, e.seconds = about.get("tokens", 0), about.get("seconds", 0.0)
        self._complete(e, nll)
        self.folder.attempts.end(PART, e.fingerprint)
        return True

    def _on_disk(self, fingerprint: str) -> int:
        """Windows of a policy that are saved."""
        return len(self._load(fingerprint)) if self.folder.has_nll(PART, fingerprint) else 0

    # -- how it ends ---------------------------------------------------------------------------

    def begun(self, evaluation: Evaluation) -> None:
        """Write the journal line of its start; a trial on further windows stays complete."""
        e = evaluation
        if isinstance(e, TrialEvaluation) and not isinstance(e, WiderEvaluation):
            e.trial = replace(e.trial, attempt=e.attempt)
            self.folder.append(e.trial)

    def measured(self, evaluation: Evaluation, found: Measured) -> bool:
        """Finish a trial at its last rung or where it is clearly behind, or let it continue."""
        e, nll = evaluation, found.nll
        if not isinstance(e, TrialEvaluation):
            self.full = self._save(e, nll, {"name": "full"})
            return False
        tokens, seconds = e.tokens, e.seconds
        if isinstance(e, WiderEvaluation):
            tokens, seconds = e.trial.tokens + tokens, (e.trial.seconds or 0.0) + seconds
        about = {"name": e.trial.name, "tokens": tokens, "seconds": seconds}
        if e.last:
            e.tokens, e.seconds = tokens, seconds
            self._complete(e, self._save(e, nll, about))
            return False
        e.seen.append((len(nll), nll.shape[1] + 1, self._dnll(nll)))
        if reason := self._rivals.verdict(e.trial, nll, self.trials):
            self.folder.save_nll(f"{PART}-stopped", e.fingerprint, nll, about)
            windows = len(nll)
            how: dict[str, Any] = {"rungs": tuple(e.seen), "windows": windows, "error": reason}
            self._finish(self._done(e, state="pruned", **how))
            return False
        return True

    def _save(
        self, e: Evaluation, nll: NDArray[np.float32], about: dict[str, Any]
    ) -> NDArray[np.float32]:
        """Save the NLL with that of the windows before; returns both together."""
        if e.first:
            nll = np.concatenate([self._load(e.fingerprint)[: e.first], nll])
        self.folder.save_nll(PART, e.fingerprint, nll, about)
        return nll

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Finish a trial without a measurement; too many of these alone end the run."""
        e = evaluation
        if not isinstance(e, TrialEvaluation):
            raise RunError(f"the full cache cannot be evaluated: {error}")
        if isinstance(e, WiderEvaluation):
            self._lost(e.trial, f"on further windows: {error}")
            return
        self._finish(self._done(e, state="failed", error=error))
        worked = any(t.state in ("complete", "pruned") for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= HOPELESS:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")

    def _complete(self, e: TrialEvaluation, nll: NDArray[np.float32]) -> None:
        start = self.task.score_from - 1
        if self.task.growing:
            looks = [(w, nll.shape[1] + 1) for w in range(1, len(nll) + 1)]
        else:
            looks = [(w or len(nll), t) for w, t in e.rungs] if self.task.racing else []
        done = self._done(
            e,
            state="complete",
            nll=float(nll[:, start:].mean()),
            dnll=self._dnll(nll),
            rungs=tuple((w, t, self._dnll(nll[:w, : t - 1])) for w, t in looks),
            windows=len(nll),
        )
        if isinstance(e, WiderEvaluation):
            self._replace(done)
        else:
            self._finish(done)

    def _done(self, e: TrialEvaluation, **how: Any) -> Trial:
        return replace(e.trial, tokens=e.tokens, seconds=e.seconds, **how)

    def _finish(self, trial: Trial) -> None:
        """A finished trial goes to the journal, then to Optuna's study, then to `watch`."""
        self.folder.append(trial)
        self.trials.append(trial)
        if trial.number >= 0:
            self.study.tell(trial)
        self._misses += trial.state in ("rejected", "duplicate")
        self.watch(trial, self.trials)

    def _replace(self, trial: Trial) -> None:
        """A trial that was complete and has more windows, or failed there, in its old place."""
        self.folder.append(trial)
        self.trials[[t.number for t in self.trials].index(trial.number)] = trial
        self._stale = True

    def _lost(self, trial: Trial, error: str) -> None:
        """A trial that was complete and failed on further windows; it counts no longer."""
        self._replace(replace(trial, state="failed", error=error, nll=None, dnll=None))

    def _renew(self) -> None:
        """Give Optuna all trials anew if losses changed."""
        if not self._stale:
            return
        self.study.renew([*self.trials, *self._interrupted, *self._under_way()])
        self._stale = False

    # -- comparing -----------------------------------------------------------------------------

    def _dnll(self, nll: NDArray[np.float32]) -> float:
        start = self.task.score_from - 1
        full = self.full[: len(nll), start : nll.shape[1]]
        return float((nll[:, start:] - full).mean())

    def _load(self, fingerprint: str) -> NDArray[np.float32]:
        return self.folder.load_nll(PART, fingerprint)[0]


def _dated(trial: Trial, windows: int) -> Trial:
    """A trial of an earlier version, which did not say that it has all windows."""
    whole = trial.state in ("complete", "duplicate") and not trial.windows
    return replace(trial, windows=windows) if whole else trial
