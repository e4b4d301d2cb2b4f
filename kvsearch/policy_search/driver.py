"""The search: one driver owns the study, evaluators only evaluate.

What is evaluated next depends on the trials only, which are in the journal. The full cache is the
reference of all; then come trials that a kill interrupted, the methods, and free proposals in turn
with further windows of the best policies. A policy over budget costs nothing: its bytes are exact.
A policy seen before gets the values it had then.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.admission import KINDS, Task, admitted, baselines
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.fixed_list import GIVEN_UP, PART, measure
from kvsearch.policy_search.job_loop import Evaluation, Loop
from kvsearch.policy_search.optuna_study import Study
from kvsearch.policy_search.pacing import Pacing
from kvsearch.policy_search.trials import SearchState, Watch
from kvsearch.policy_search.window_scheduler import WindowScheduler
from kvsearch.policy_space import Value
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.naming import name_of
from kvsearch.results.attempts import ATTEMPTS
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Kind, Trial

MAX_FAILURES = 5  # in a row, without one success, that end a run


class Search:
    """Runs a task in a folder, and picks up where an earlier run of it stopped.

    Args:
        task: what to do.
        executor: where evaluations run; the caller closes it.
        folder: where everything is kept.
        watch: called with every finished trial, and all of them.

    Attributes:
        loop: of the evaluations, over all slots of the executor.
        state: what was found.
        pacing: how many free proposals are still made.
        methods: that are still to be evaluated, by name.
    """

    def __init__(self, task: Task, executor: Executor, folder: RunFolder, watch: Watch) -> None:
        self.task, self.executor, self.folder = task, executor, folder
        self.loop = Loop(executor, folder.attempts, self)
        self.state = state = SearchState(task, folder, watch, self.loop.running)
        self.pacing = Pacing(state)
        self._windows = WindowScheduler(state, self.pacing, executor.slots)
        known = {t.name for t in [*state.trials, *state.interrupted]}
        first = [
            *task.portfolio,
            *baselines(task.warm_start, task.exclude_method, task.setting.prompt > 0),
        ]
        self.methods = [(n, m) for n, m in first if n not in known]

    @property
    def trials(self) -> list[Trial]:
        """All trials that have ended."""
        return self.state.trials

    @property
    def study(self) -> Study:
        """The study that proposals come from."""
        return self.state.study

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        if self.executor.slots > 1:
            self.state.restore()
        else:
            self.prepare()
        self.loop.drive()
        self.state.renew()
        self.state.clear()
        return self.trials

    def prepare(self) -> None:
        """Measure the full cache, the reference of every comparison."""
        full, step = Policy(name="full"), self.state.step
        measure(
            self.executor, self.folder, PART, [full], self.task.setting, resident=False,
            windows=step, together=step,
        )  # fmt: skip
        self.state.restore()

    # -- what is evaluated next ----------------------------------------------------------------

    def next(self) -> Evaluation | None:
        """The next evaluation that is needed, or None when there is nothing to start now."""
        state = self.state
        while True:
            if self._lacks_full():
                return self._windows.full(0, 0)
            if state.interrupted:
                trial = self._again(state.interrupted.pop(0))
            elif self.methods:
                name, method = self.methods.pop(0)
                trial = self._method(name, KINDS[method.kind], method.knobs)
            elif (wider := self._windows.due()) is not None:
                if state.recover(wider):
                    continue
                return wider
            elif self.pacing.wanted() and not self.pacing.waits():
                state.renew()
                if self.pacing.end():
                    continue
                asked, knobs = state.study.ask()
                name = name_of(knobs, self._names(), asked.number)
                trial = self.admit(asked, name, "searched", knobs)
            else:
                return self._windows.prefetch()
            if trial is None:
                continue
            evaluation = Evaluation(
                number=trial.number, part=PART, policy=trial.policy,
                fingerprint=trial.fingerprint, windows=state.step,
                trial=trial,
            )  # fmt: skip
            if not state.recover(evaluation):
                return evaluation

    def admit(
        self, asked: optuna.Trial | int, name: str, kind: Kind, knobs: Mapping[str, Value]
    ) -> Trial | None:
        """A proposal that needs an evaluation; others are finished here.

        Args:
            asked: Optuna's trial, or the number of a method that the space does not contain.
            name: of the trial.
            kind: of the trial.
            knobs: what was proposed.
        """
        state = self.state
        inside = isinstance(asked, optuna.Trial)
        number = asked.number if isinstance(asked, optuna.Trial) else asked
        system = state.study.trials[number].system_attrs if inside else {}
        noted = {k: v for k, v in system.items() if k != "fixed_params"}
        trial = admitted(state.task, number, name, kind, knobs, noted)
        if trial.state == "rejected":
            state.finish(trial)
            return None
        twin = state.twin(trial.fingerprint)
        if twin is not None and twin.state == "failed":  # it may have killed its evaluator
            error = f"same policy as {twin.name}, which failed"
            state.finish(replace(trial, state="rejected", error=error))
            return None
        if twin is not None:
            same: dict[str, Any] = {k: getattr(twin, k) for k in ("nll", "dnll", "windows")}
            error = f"same policy as {twin.name}"
            state.finish(replace(trial, state="duplicate", error=error, **same))
            return None
        return trial

    def _names(self) -> set[str]:
        """Names that a proposal cannot have."""
        there = (t.name for t in [*self.state.trials, *self.state.under_way()])
        return {*METHODS, *(name for name, _ in self.state.task.portfolio), *there}

    def _lacks_full(self) -> bool:
        """Whether the full cache is to be measured beside the first policies."""
        under_way = any(e.trial is None for e in self.loop.running.values())
        return not len(self.state.full) and not under_way

    def _again(self, before: Trial) -> Trial | None:
        """A trial that was under way when the driver or its evaluator was killed."""
        killed = self.state.attempts(before) >= ATTEMPTS
        if not killed or self.folder.has_nll(PART, before.fingerprint):
            return before  # if it was killed after its NLL was saved, `recover` finishes it
        self.state.finish(replace(before, state="failed", error=GIVEN_UP))
        return None

    def _method(self, name: str, kind: Kind, knobs: Mapping[str, Value]) -> Trial | None:
        state = self.state
        params = state.task.space.params(knobs)
        if params is not None:
            asked, knobs = state.study.ask(params)
            return self.admit(asked, name, kind, knobs)
        numbers = [t.number for t in [*state.trials, *state.under_way()]]
        return self.admit(min([0, *numbers]) - 1, name, kind, knobs)  # not in Optuna's study

    # -- what the loop tells -------------------------------------------------------------------

    def begun(self, evaluation: Evaluation) -> None:
        """Write the journal line of its start; a trial on further windows stays complete."""
        e = evaluation
        if e.trial is not None and not e.first:
            e.trial = self.state.begin(e.trial, e.attempt)

    def measured(self, evaluation: Evaluation, found: Measurement) -> None:
        """Finish a trial on its first windows, or add further ones to it."""
        e = evaluation
        if e.trial is not None and not e.first:
            self.state.add(e.trial, found)
        else:
            self.state.add_windows(e, found)

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Finish a trial without a measurement; too many of these alone end the run.

        A prefetched window that fails is forgotten, and the policy gets none ahead any more.
        """
        e = evaluation
        if e.trial is None:
            raise RunError(f"the full cache cannot be evaluated: {error}")
        if e.piece:
            self.state.unfetched.add(e.fingerprint)
            return
        if e.first:
            self.state.fail_windows(e.trial, f"on further windows: {error}")
            return
        self.state.fail(e.trial, error, e.seconds)
        worked = any(t.state == "complete" for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= MAX_FAILURES:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")
