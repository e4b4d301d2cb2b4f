"""Where jobs run: in this process, in spawned processes, or as Ray actors. One small interface."""

from typing import Protocol

from kvsearch.policy_search.worker import Job, Outcome


class Executor(Protocol):
    """A few slots that each run one job at a time and keep their model loaded.

    Attributes:
        slots: how many jobs run at once.
    """

    slots: int

    def open(self) -> None:
        """Start all evaluators that are not there, so that they load side by side."""

    def submit(self, slot: int, job: Job) -> None:
        """Start a job on a slot that is free; a slot whose evaluator died is opened anew."""

    def wait(self) -> tuple[int, Outcome]:
        """Block until a job ends; its slot is free again. Dead evaluators end as `died`."""

    def close(self) -> None:
        """Stop everything now, also jobs that still run."""
