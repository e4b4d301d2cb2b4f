"""The search: one driver owns the study, evaluators only evaluate.

A scheduler decides what is evaluated next, the loop keeps the evaluators busy, and the state holds
the records. The driver joins the three.
"""

from typing import TypeGuard

from kvsearch.errors import RunError
from kvsearch.evaluation.measurement import Measurement
from kvsearch.policy import Policy
from kvsearch.policy_search.evaluations import TrialEvaluation, WiderEvaluation
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.loop import Evaluation, Loop
from kvsearch.policy_search.measure import PART, measure
from kvsearch.policy_search.scheduler import Scheduler
from kvsearch.policy_search.state import SearchState, Watch
from kvsearch.policy_search.study import Study
from kvsearch.policy_search.task import Task
from kvsearch.records import Trial

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
        scheduler: of what is evaluated next.
    """

    def __init__(self, task: Task, executor: Executor, folder: RunFolder, watch: Watch) -> None:
        self.task, self.executor, self.folder = task, executor, folder
        self.loop = Loop[Evaluation](executor, folder.attempts, self)
        self.state = SearchState(task, folder, watch, self.loop.running)
        self.scheduler = Scheduler(self.state, executor.slots)

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

    # -- what the loop asks and tells ----------------------------------------------------------

    def next(self) -> Evaluation | None:
        """The next evaluation that is needed, or None when there is nothing to start now."""
        return self.scheduler.next()

    def begun(self, evaluation: Evaluation) -> None:
        """Write the journal line of its start; a trial on further windows stays complete."""
        if _is_first(evaluation):
            self.state.begin(evaluation)

    def measured(self, evaluation: Evaluation, found: Measurement) -> None:
        """Finish a trial on its first windows, or add further ones to it."""
        if _is_first(evaluation):
            self.state.add(evaluation, found)
        else:
            self.state.add_windows(evaluation, found)

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Finish a trial without a measurement; too many of these alone end the run.

        A prefetched window that fails is forgotten, and the policy gets none ahead any more.
        """
        e = evaluation
        if not isinstance(e, TrialEvaluation):
            raise RunError(f"the full cache cannot be evaluated: {error}")
        if isinstance(e, WiderEvaluation):
            if e.piece:
                self.state.unfetched.add(e.fingerprint)
            else:
                self.state.fail_windows(e.trial, f"on further windows: {error}")
            return
        self.state.fail(e, error)
        worked = any(t.state == "complete" for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= MAX_FAILURES:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")


def _is_first(e: Evaluation) -> TypeGuard[TrialEvaluation]:
    """Whether it is a trial on its first windows."""
    return isinstance(e, TrialEvaluation) and not isinstance(e, WiderEvaluation)
