"""What a search evaluates next. It depends on the trials only, which are in the journal.

The full cache is the reference of all; then come trials that a kill interrupted, the methods, and
free proposals in turn with further windows of the best policies. A policy over budget costs
nothing: its bytes are exact. A policy seen before gets the values it had then.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import optuna

from kvsearch.knobs import Value
from kvsearch.policy_search.crash_counter import ATTEMPTS
from kvsearch.policy_search.evaluations import FullEvaluation, TrialEvaluation, WiderEvaluation
from kvsearch.policy_search.loop import Evaluation
from kvsearch.policy_search.measure import GIVEN_UP, PART
from kvsearch.policy_search.proposals import Proposals
from kvsearch.policy_search.state import SearchState
from kvsearch.policy_search.task import KINDS, admitted, baselines
from kvsearch.policy_search.window_scheduler import WindowScheduler
from kvsearch.records import Kind, Trial


class Scheduler:
    """The evaluations of a search, one at a time.

    Args:
        state: of the search.
        slots: evaluators.

    Attributes:
        methods: that are still to be evaluated, by name.
    """

    def __init__(self, state: SearchState, slots: int) -> None:
        self.state, task = state, state.task
        self.proposals = Proposals(state)
        self.windows = WindowScheduler(state, self.proposals, slots)
        known = {t.name for t in [*state.trials, *state.interrupted]}
        first = [
            *task.portfolio,
            *baselines(task.warm_start, task.exclude_method, task.setting.prompt > 0),
        ]
        self.methods = [(n, m) for n, m in first if n not in known]

    def next(self) -> Evaluation | None:
        """The next evaluation that is needed, or None when there is nothing to start now."""
        state = self.state
        while True:
            if self._lacks_full():
                return self.windows.full(0, 0)
            if state.interrupted:
                trial = self._again(state.interrupted.pop(0))
            elif self.methods:
                name, method = self.methods.pop(0)
                trial = self._method(name, KINDS[method.kind], method.knobs)
            elif (wider := self.windows.due()) is not None:
                if isinstance(wider, WiderEvaluation) and state.recover(wider):
                    continue
                return wider
            elif self.proposals.wanted() and not self.proposals.waits():
                state.renew()
                if self.proposals.end():
                    continue
                asked, knobs = state.study.ask()
                trial = self.admit(asked, f"trial {asked.number}", "searched", knobs)
            else:
                return self.windows.prefetch()
            if trial is None:
                continue
            evaluation = TrialEvaluation(
                number=trial.number, part=PART, policy=trial.policy,
                fingerprint=trial.fingerprint, windows=state.step,
                stop=state.task.setting.tokens, trial=trial,
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

    def _lacks_full(self) -> bool:
        """Whether the full cache is to be measured beside the first policies."""
        under_way = any(isinstance(e, FullEvaluation) for e in self.state.running.values())
        return not len(self.state.full) and not under_way

    def _again(self, before: Trial) -> Trial | None:
        """A trial that was under way when the driver or its evaluator was killed."""
        killed = self.state.attempts(before) >= ATTEMPTS
        if not killed or self.state.folder.has_nll(PART, before.fingerprint):
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
