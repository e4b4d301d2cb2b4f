"""The search: one driver owns the study, evaluators only evaluate.

The measurements of a trial are on disk before Optuna has them, so a kill costs only the evaluations
under way. A policy over budget costs nothing: its bytes are exact. A policy seen before gets the
values it had then.

Every policy starts on the first windows, and the best get more (`growing`): a free proposal and one
more window for a contender follow each other in turn. What comes next depends on the trials only,
which are in the journal.
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
from kvsearch.policy_search.attempts import ATTEMPTS
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.loop import Evaluation
from kvsearch.policy_search.measure import GIVEN_UP, PART, measure
from kvsearch.policy_search.study import Study
from kvsearch.policy_search.task import KINDS, Task, admitted, baselines
from kvsearch.policy_search.turns import (
    FullEvaluation,
    TrialEvaluation,
    WiderEvaluation,
    kept_free,
    waits,
)
from kvsearch.policy_search.widening import Widening
from kvsearch.policy_search.work import Measured
from kvsearch.records import Kind, Trial

HOPELESS = 5  # failures in a row, without one success, that end a run

Watch = Callable[[Trial, list[Trial]], None]


class Search(Widening):
    """Runs a task in a folder, and picks up where an earlier run of it stopped.

    Args:
        task: what to do.
        executor: where evaluations run; the caller closes it.
        folder: where everything is kept.
        watch: called with every finished trial, and all of them.
    """

    def __init__(self, task: Task, executor: Executor, folder: RunFolder, watch: Watch) -> None:
        super().__init__(task, executor, folder, folder.trials())
        self.watch = watch
        self._held: list[TrialEvaluation] = []  # measured before the full cache was
        budget = task.setting.budget_bytes
        self.study = Study(task.space, task.sampler, task.seed, budget, task.speed is not None)
        self._interrupted = folder.running()
        self._stale = True
        self._renew()
        known = {t.name for t in [*self.trials, *self._interrupted]}
        methods = [
            *task.portfolio,
            *baselines(task.warm_start, task.exclude_method, task.setting.prompt > 0),
        ]
        self._methods = [(n, m) for n, m in methods if n not in known]
        self._enough = False
        self._misses = sum(t.state in ("rejected", "duplicate") for t in self.trials)

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        if self.executor.slots > 1:
            self._resume()
        else:
            self.prepare()
        self.drive()
        self._renew()
        self._pieces.clear()
        return self.trials

    def prepare(self) -> None:
        """Measure the full cache, the reference of every comparison."""
        full = Policy(name="full")
        measure(
            self.executor, self.folder, PART, [full], self.task.setting, resident=False,
            windows=self._first, together=self._first,
        )  # fmt: skip
        self._resume()

    def _resume(self) -> None:
        """Take up the full cache as far as it is measured, and windows that waited for others."""
        if self.folder.has_nll(PART, self._full_key):
            self.full = self._load(self._full_key)
        self._pieces.restore()
        self._join_full()

    # -- what comes next -----------------------------------------------------------------------

    def next(self) -> Evaluation | None:
        """The next evaluation that is needed, or None when there is nothing to start now."""
        while True:
            if self._lacks_full():
                return self._full_from(0, 0)
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
                if self._stops():
                    continue
                asked, knobs = self.study.ask()
                trial = self._check(asked, f"trial {asked.number}", "searched", knobs)
            else:
                return self._ahead()
            if trial is None:
                continue
            evaluation = self._evaluation(trial)
            if not self._known(evaluation):
                return evaluation

    def _proposed(self) -> int:
        """Free proposals that are evaluated, or were."""
        spent = sum(t.kind == "searched" and t.state in ("complete", "failed") for t in self.trials)
        return spent + sum(t.kind == "searched" for t in self._under_way())

    def _wanted(self) -> bool:
        """Whether another free proposal should be started."""
        more = self._proposed() < self.task.trials and not self._enough
        return more and self._misses < 50 * (self.task.trials + 1)

    def _stops(self) -> bool:
        """Whether nothing is to be gained by further proposals; asked anew before each."""
        enough = self.task.enough
        self._enough = enough is not None and enough(self.study.optuna_study)
        return self._enough

    def _waits(self) -> bool:
        kinds = [t.kind for t in self._under_way()]
        return waits(kinds, self.task.trials - self._proposed())

    def _kept_free(self) -> int:
        kinds = [t.kind for t in self._under_way()]
        return kept_free(kinds, self.task.trials - self._proposed(), self.executor.slots)

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
            same: dict[str, Any] = {k: getattr(twin, k) for k in ("nll", "dnll", "windows")}
            error = f"same policy as {twin.name}"
            self._finish(replace(trial, state="duplicate", error=error, **same))
            return None
        return trial

    def _twin(self, fingerprint: str) -> Trial | None:
        return next(
            (
                t
                for t in [*self.trials, *self._under_way(), *self._interrupted]
                if t.fingerprint == fingerprint and t.state in ("complete", "running", "failed")
            ),
            None,
        )

    def _under_way(self) -> list[Trial]:
        """Trials that are evaluated for the first time."""
        first = [e for e in self.running.values() if not isinstance(e, WiderEvaluation)]
        return [e.trial for e in [*self._held, *first] if isinstance(e, TrialEvaluation)]

    def _lacks_full(self) -> bool:
        """Whether the full cache is to be measured beside the first policies."""
        under_way = any(isinstance(e, FullEvaluation) for e in self.running.values())
        return not len(self.full) and not under_way

    def _evaluation(self, trial: Trial) -> TrialEvaluation:
        return TrialEvaluation(
            number=trial.number, part=PART, policy=trial.policy, fingerprint=trial.fingerprint,
            windows=self._first, stop=self._tokens, trial=trial,
        )  # fmt: skip

    def _known(self, e: TrialEvaluation) -> bool:
        """Finish a trial whose NLL was saved just before a kill."""
        if self._on_disk(e.fingerprint) < e.first + e.windows:
            return False
        nll, about = self.folder.load_nll(PART, e.fingerprint)
        e.tokens, e.seconds = about.get("tokens", 0), about.get("seconds", 0.0)
        if isinstance(e, WiderEvaluation):
            e.trial = replace(e.trial, tokens=e.tokens, seconds=e.seconds)
            self._replace(self._record(e.trial, nll))
        else:
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

    def measured(self, evaluation: Evaluation, found: Measured) -> None:
        """Finish a trial on its first windows, or add further ones to it."""
        e = evaluation
        if isinstance(e, WiderEvaluation) or not isinstance(e, TrialEvaluation):
            self._widened(e, found)
            return
        about = {"name": e.trial.name, "tokens": e.tokens, "seconds": e.seconds}
        self.folder.save_nll(PART, e.fingerprint, found.nll, about)
        self._complete(e, found.nll)

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Finish a trial without a measurement; too many of these alone end the run."""
        e = evaluation
        if not isinstance(e, TrialEvaluation):
            raise RunError(f"the full cache cannot be evaluated: {error}")
        if isinstance(e, WiderEvaluation):
            self._unwidened(e, error)
            return
        self._finish(self._done(e, state="failed", error=error))
        worked = any(t.state == "complete" for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= HOPELESS:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")

    def _complete(self, e: TrialEvaluation, nll: NDArray[np.float32]) -> None:
        """Finish a trial on its first windows; without the full cache there, it has to wait."""
        if len(nll) > len(self.full):
            self._held.append(e)
            return
        self._finish(self._record(self._done(e), nll))

    def _join_full(self) -> None:
        """Policies that were measured before the full cache can be compared now, too."""
        super()._join_full()
        held, self._held = self._held, []
        for e in held:
            self._complete(e, self._load(e.fingerprint))

    def _record(self, trial: Trial, nll: NDArray[np.float32]) -> Trial:
        """A complete trial with what follows from its NLL."""
        return replace(
            trial,
            state="complete",
            nll=float(nll[:, self.task.score_from - 1 :].mean()),
            dnll=self._dnll(nll),
            windows=len(nll),
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
        self._join(trial.fingerprint)

    def _replace(self, trial: Trial) -> None:
        """A trial that was complete and has more windows, or failed there, in its old place."""
        self.folder.append(trial)
        self.trials[[t.number for t in self.trials].index(trial.number)] = trial
        self._stale = True

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
