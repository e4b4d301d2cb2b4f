"""What an evaluator does: jobs in, measurements, answers or failures out; nothing is raised.

The driver never loads a model and an evaluator never sees the study. A job says which policy, on
which part of the text, on how many of its windows.
Nothing heavy is imported here, so that an evaluator that died is back in a second.
"""

import os
import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from kvsearch.errors import KvsearchError, OutOfMemory, lacks_memory
from kvsearch.policy import Policy
from kvsearch.results.measurement import Measurement

Status = Literal["ok", "failed", "oom", "died", "unopened"]


@dataclass(frozen=True)
class Job:
    """One piece of work; picklable.

    Attributes:
        key: identity of the job; its outcome has the same.
        part: name of the text part, such as `search`.
        policy: what to evaluate.
        windows: how many of the part's windows, from `first` on; all if None.
        resident: also pack the cache and count its bytes.
        first: number of the first of these windows.
    """

    key: int
    part: str
    policy: Policy
    windows: int | None = None
    resident: bool = False
    first: int = 0


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a job ended.

    Attributes:
        key: of the job.
        status: `oom` keeps the model loaded; `died` means that the evaluator is gone; `unopened`
            that it ended before the job began, so the policy is not the cause.
        measured: present when `ok`.
        error: one sentence otherwise.
        seconds: wall time of the job, whatever came of it.
    """

    key: int
    status: Status
    measured: Measurement | None = None
    error: str = ""
    seconds: float = 0.0


class Unusable(RuntimeError):
    """The device of an evaluator refuses whatever follows; only another process can go on."""


class Session(Protocol):
    """A loaded evaluator."""

    def run(self, job: Job) -> Measurement:
        """Evaluate; any exception becomes a failed outcome."""

    def forget(self) -> None:
        """Drop what a failed job left, so that the next job has all the memory.

        Raises:
            Unusable: there can be no next job.
        """


class Work(Protocol):
    """How an evaluator is made; picklable, so that another process can open it."""

    def open(self, slot: int) -> Session:
        """Load what is needed on the device of `slot`."""


def attempt(session: Session, job: Job) -> Outcome:
    """Run a job; every exception becomes an outcome, and the session stays usable.

    Raises:
        Unusable: it does not, and the job is the cause, as if the evaluator had died.
    """
    start = time.perf_counter()
    status: Status = "failed"
    try:
        measured = session.run(job)
        if np.isfinite(measured.nll).all():
            return Outcome(job.key, "ok", measured, seconds=time.perf_counter() - start)
        error = f"policy {job.policy.name or job.key} gave an NLL that is not finite"
    except KvsearchError as e:
        status, error = "oom" if isinstance(e, OutOfMemory) else "failed", str(e)
    except Exception as e:  # a bug in kvsearch must not end the study
        text = " ".join(str(e).split())[:300]
        if lacks_memory(e):
            status, error = "oom", text or "out of memory"
        elif os.environ.get("KVSEARCH_DEBUG"):
            raise
        else:
            error = f"{type(e).__name__}: {text}"
    # only now: until an `except` ends, the traceback holds the frames and with them the caches
    session.forget()
    return Outcome(job.key, status, error=error, seconds=time.perf_counter() - start)


def why_unopened(error: Exception) -> str:
    """Why an evaluator could not be opened, in one sentence that crosses processes."""
    if isinstance(error, KvsearchError):
        return str(error)
    return f"an evaluator could not start ({type(error).__name__}: {' '.join(str(error).split())})"
