"""The search: one driver owns the study, evaluators only evaluate.

The measurements of a trial are on disk before Optuna has them, so a kill costs only the evaluations
under way. A policy over budget costs nothing: its bytes are exact. A policy seen before gets the
values it had then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.knobs import Value
from kvsearch.policy import Policy
from kvsearch.records import Kind, Trial
from kvsearch.search import race
from kvsearch.search.attempts import ATTEMPTS
from kvsearch.search.executors import Executor
from kvsearch.search.folder import RunFolder
from kvsearch.search.loop import Evaluation, Loop
from kvsearch.search.measure import GIVEN_UP, PART, measure
from kvsearch.search.rivals import Rivals
from kvsearch.search.study import Study
from kvsearch.search.task import Task, admitted, baselines
from kvsearch.search.work import Measured

HOPELESS = 5  # failures in a row, without one success, that end a run

Watch = Callable[[Trial, list[Trial]], None]


@dataclass(kw_only=True)
class TrialEvaluation(Evaluation):
    """The evaluation of a trial on the search text."""

    trial: Trial


class Search(Loop[TrialEvaluation]):
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
        self.trials = folder.trials()
        budget = task.setting.budget_bytes
        self.study = Study(task.space, task.sampler, task.seed, budget, task.speed is not None)
        self._interrupted = folder.running()
        self.study.restore([*self.trials, *self._interrupted])
        self._rivals = Rivals(task.setting.shape, task.score_from, task.setting.tokens, self._load)
        known = {t.name for t in [*self.trials, *self._interrupted]}
        methods = baselines(task.warm_start, task.exclude_method)
        self._methods = [(n, m) for n, m in methods if n not in known]
        self._misses = sum(t.state in ("rejected", "duplicate") for t in self.trials)

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        self.prepare()
        self.drive()
        return self.trials

    def prepare(self) -> None:
        """Measure the full cache, the reference of every comparison."""
        full = Policy(name="full")
        measure(self.executor, self.folder, PART, [full], self.task.setting, resident=False)
        self.full = self._load(full.fingerprint(self.task.setting.shape.layers))

    # -- what comes next -----------------------------------------------------------------------

    def next(self) -> TrialEvaluation | None:
        """The next trial that needs an evaluation, or None when there is nothing to start."""
        while True:
            if self._interrupted:
                trial = self._again(self._interrupted.pop(0))
            elif self._methods:
                name, method = self._methods.pop(0)
                kind: Kind = "combined" if method.kind == "combined" else "method"
                trial = self._method(name, kind, method.knobs)
            elif self._wanted():
                asked, knobs = self.study.ask()
                trial = self._check(asked, f"trial {asked.number}", "searched", knobs)
            else:
                return None
            if trial is None:
                continue
            evaluation = self._evaluation(trial)
            if not self._known(evaluation):
                return evaluation

    def _wanted(self) -> bool:
        """Whether another free proposal should be started."""
        spent = sum(
            t.kind == "searched" and t.state in ("complete", "pruned", "failed")
            for t in self.trials
        )
        spent += sum(e.trial.kind == "searched" for e in self.running.values())
        return spent < self.task.trials and self._misses < 50 * (self.task.trials + 1)

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
            same: dict[str, Any] = {"nll": twin.nll, "dnll": twin.dnll, "rungs": twin.rungs}
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
        return [e.trial for e in self.running.values()]

    def _evaluation(self, trial: Trial) -> TrialEvaluation:
        t = self.task
        looks = race.rungs(trial.policy, t.setting.tokens, t.score_from, t.windows, t.together)
        return TrialEvaluation(
            number=trial.number, part=PART, policy=trial.policy, fingerprint=trial.fingerprint,
            rungs=looks if t.racing else looks[-1:], trial=trial,
        )  # fmt: skip

    def _known(self, e: TrialEvaluation) -> bool:
        """Finish a trial whose NLL was saved just before a kill."""
        if not self.folder.has_nll(PART, e.fingerprint):
            return False
        nll, about = self.folder.load_nll(PART, e.fingerprint)
        e.tokens, e.seconds = about.get("tokens", 0), about.get("seconds", 0.0)
        self._complete(e, nll)
        self.folder.attempts.end(PART, e.fingerprint)
        return True

    # -- how it ends ---------------------------------------------------------------------------

    def begun(self, evaluation: TrialEvaluation) -> None:
        """Write the journal line of its start."""
        evaluation.trial = replace(evaluation.trial, attempt=evaluation.attempt)
        self.folder.append(evaluation.trial)

    def measured(self, evaluation: TrialEvaluation, found: Measured) -> bool:
        """Finish a trial at its last rung or where it is clearly behind, or let it continue."""
        e, nll = evaluation, found.nll
        about = {"name": e.trial.name, "tokens": e.tokens, "seconds": e.seconds}
        if e.last:
            self.folder.save_nll(PART, e.fingerprint, nll, about)
            self._complete(e, nll)
            return False
        e.seen.append((len(nll), nll.shape[1] + 1, self._dnll(nll)))
        if reason := self._rivals.verdict(e.trial, nll, self.trials):
            self.folder.save_nll(f"{PART}-stopped", e.fingerprint, nll, about)
            self._finish(self._done(e, state="pruned", rungs=tuple(e.seen), error=reason))
            return False
        return True

    def failed(self, evaluation: TrialEvaluation, error: str) -> None:
        """Finish a trial without a measurement; too many of these alone end the run."""
        self._finish(self._done(evaluation, state="failed", error=error))
        worked = any(t.state in ("complete", "pruned") for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= HOPELESS:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")

    def _complete(self, e: TrialEvaluation, nll: NDArray[np.float32]) -> None:
        start = self.task.score_from - 1
        looks = e.rungs if self.task.racing else ()
        self._finish(
            self._done(
                e,
                state="complete",
                nll=float(nll[:, start:].mean()),
                dnll=self._dnll(nll),
                rungs=tuple((w or len(nll), t, self._dnll(nll[:w, : t - 1])) for w, t in looks),
            )
        )

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

    # -- comparing -----------------------------------------------------------------------------

    def _dnll(self, nll: NDArray[np.float32]) -> float:
        start = self.task.score_from - 1
        full = self.full[: len(nll), start : nll.shape[1]]
        return float((nll[:, start:] - full).mean())

    def _load(self, fingerprint: str) -> NDArray[np.float32]:
        return self.folder.load_nll(PART, fingerprint)[0]
