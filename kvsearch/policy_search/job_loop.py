"""The one loop of evaluations: free slots get jobs, outcomes come back, attempts are counted.

A source decides what is evaluated next and what follows from a measurement: the search proposes
policies (`driver`), `measure` has a fixed list.
"""

import contextlib
from dataclasses import dataclass, replace
from typing import Protocol

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.worker import Job, Outcome
from kvsearch.results.attempts import ATTEMPTS, Attempts
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Trial


@dataclass(kw_only=True)
class Evaluation:
    """A policy on its way through a part of the text.

    Attributes:
        number: of the jobs it becomes.
        part: of the text.
        policy: what is evaluated.
        fingerprint: its identity on this model.
        windows: how many, from the first on.
        resident: whether the bytes of the packed cache are counted, too.
        counted: whether attempts of earlier processes count, too.
        first: number of the first of its windows.
        piece: whether it is a part of what one record will hold, see `measure`.
        trial: of a search, whose policy this is; None of the full cache, and outside a search.
        due: whether its windows are needed now; else an idle evaluator prefetches them.
        tries: how often it is begun at most, if it kills its evaluator.
        attempt: how often it was begun.
        seconds: wall time of all of its jobs.
    """

    number: int
    part: str
    policy: Policy
    fingerprint: str
    windows: int
    resident: bool = False
    counted: bool = True
    first: int = 0
    piece: bool = False
    trial: Trial | None = None
    due: bool = True
    tries: int = ATTEMPTS
    attempt: int = 0
    seconds: float = 0.0

    @property
    def kept(self) -> str:
        """Name of its record in the folder: its part, and for a piece its first window."""
        return f"{self.part}.{self.first}" if self.piece else self.part

    def job(self) -> Job:
        """What an evaluator has to do."""
        return Job(self.number, self.part, self.policy, self.windows, self.resident, self.first)


class Source(Protocol):
    """Decides what is evaluated, and keeps what comes of it."""

    def next(self) -> Evaluation | None:
        """The next evaluation, or None when there is nothing to start now."""

    def begun(self, evaluation: Evaluation) -> None:
        """Called before an attempt starts; it is counted by then."""

    def measured(self, evaluation: Evaluation, found: Measurement) -> None:
        """Keep what was measured; its seconds are those of all attempts."""

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Keep why nothing more will come of it."""


class Loop:
    """Evaluates until there is nothing left.

    Args:
        executor: where evaluations run; the caller closes it.
        attempts: where they are counted.
        source: of the evaluations.

    Attributes:
        running: evaluations under way, by slot.
    """

    def __init__(self, executor: Executor, attempts: Attempts, source: Source) -> None:
        self.executor, self.attempts, self.source = executor, attempts, source
        self.running: dict[int, Evaluation] = {}

    def drive(self) -> None:
        """Fill every slot the moment it is free, until nothing is left and nothing runs.

        Raises:
            RunError: no evaluator can be opened, or the folder cannot be written.
        """
        free = set(range(self.executor.slots))
        self.executor.open()
        try:
            while True:
                while free and (job := self.take(min(free))) is not None:
                    slot = min(free)
                    free.discard(slot)
                    self.executor.submit(slot, job)
                if not self.running:
                    return
                slot, outcome = self.executor.wait()
                if (job := self.give(slot, outcome)) is not None:
                    self.executor.submit(slot, job)
                else:
                    free.add(slot)
        except (KeyboardInterrupt, RunError):
            self.release()
            raise

    def take(self, slot: int) -> Job | None:
        """The next job for a free slot, or None when there is nothing to start now."""
        evaluation = self.source.next()
        if evaluation is None:
            return None
        self.running[slot] = evaluation
        self._begin(evaluation)
        return evaluation.job()

    def give(self, slot: int, outcome: Outcome) -> Job | None:
        """Take in an outcome; the next job of its evaluation, or None if the slot is free again.

        Raises:
            RunError: no evaluator can be opened, or the folder cannot be written.
        """
        job = self._after(self.running[slot], outcome)
        if job is None:
            del self.running[slot]
        return job

    def release(self) -> None:
        """What runs is being stopped, and no policy is the cause: the attempts do not count."""
        with contextlib.suppress(RunError):  # the disk may be full
            for e in self.running.values():
                if e.counted:
                    self.attempts.release(e.kept, e.fingerprint)

    def _begin(self, e: Evaluation) -> None:
        e.attempt += 1
        if e.counted:
            e.attempt = self.attempts.begin(e.kept, e.fingerprint)
        self.source.begun(e)

    def _after(self, e: Evaluation, outcome: Outcome) -> Job | None:
        e.seconds += outcome.seconds
        if outcome.status == "unopened":
            raise RunError(outcome.error)
        if outcome.measured is not None:
            self.source.measured(e, replace(outcome.measured, seconds=e.seconds))
        elif outcome.status == "died" and e.attempt < e.tries:
            self._begin(e)
            return e.job()
        else:
            self.source.failed(e, outcome.error or "its evaluator died")
        if e.counted and outcome.status != "died":
            self.attempts.end(e.kept, e.fingerprint)
        return None
