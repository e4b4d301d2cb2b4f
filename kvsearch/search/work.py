"""What an evaluator does: jobs in, measurements out, and every way to fail as a value.

The driver never loads a model and an evaluator never sees the study. A job says which policy, on
which part of the text, up to which token; going on with the policy of the job before is cheap.
Nothing heavy is imported here, so that an evaluator that died is back in a second.
"""

import os
import time
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, OutOfMemory
from kvsearch.policy import Policy

Status = Literal["ok", "failed", "oom", "died"]


@dataclass(frozen=True)
class Job:
    """One piece of work; picklable.

    Attributes:
        key: whose it is; the outcome carries it back.
        part: name of the text part, such as `search`.
        policy: what to evaluate.
        stop: tokens of every window to evaluate, from the first.
        resident: also pack the cache and count its bytes.
    """

    key: int
    part: str
    policy: Policy
    stop: int
    resident: bool = False


@dataclass(frozen=True, eq=False)
class Measured:
    """What came out of a job that worked.

    Attributes:
        nll: nats per token `[W, stop - 1]` fp32.
        tokens: tokens that went through the model for this job.
        bytes_resident: of the packed cache, 0 if not asked for.
        impls: which implementation of each op ran.
    """

    nll: NDArray[np.float32]
    tokens: int
    bytes_resident: int = 0
    impls: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Outcome:
    """How a job ended.

    Attributes:
        key: of the job.
        status: `oom` keeps the model loaded; `died` means that the evaluator is gone.
        measured: present when `ok`.
        error: one sentence otherwise.
        seconds: wall time.
    """

    key: int
    status: Status
    measured: Measured | None = None
    error: str = ""
    seconds: float = 0.0


class Session(Protocol):
    """A loaded evaluator."""

    def run(self, job: Job) -> Measured:
        """Evaluate; any exception becomes a failed outcome."""

    def forget(self) -> None:
        """Drop what a failed job left, so that the next one has all the memory."""


class Work(Protocol):
    """How an evaluator comes to be; picklable, so that another process can open it."""

    def open(self, slot: int) -> Session:
        """Load what is needed on the device of `slot`."""


def attempt(session: Session, job: Job) -> Outcome:
    """Run a job; whatever happens is an outcome, and the session stays usable."""
    start = time.perf_counter()

    def ended(status: Status, measured: Measured | None = None, error: str = "") -> Outcome:
        return Outcome(job.key, status, measured, error, time.perf_counter() - start)

    try:
        measured = session.run(job)
        if not np.isfinite(measured.nll).all():
            session.forget()
            return ended("failed", error="it gave an NLL that is not finite")
        return ended("ok", measured)
    except (OutOfMemory, MemoryError) as e:
        session.forget()
        return ended("oom", error=str(e) or "out of memory")
    except KvsearchError as e:
        session.forget()
        return ended("failed", error=str(e))
    except Exception as e:  # a fault of ours must not end the study
        session.forget()
        text = " ".join(str(e).split())[:300]
        if "out of memory" in text or "can't allocate memory" in text:  # torch's own RuntimeErrors
            return ended("oom", error=text)
        if os.environ.get("KVSEARCH_DEBUG"):
            raise
        return ended("failed", error=f"{type(e).__name__}: {text}")
