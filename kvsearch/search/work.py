"""What an evaluator does: jobs in, measurements out, and every way to fail as a value.

The driver never loads a model and an evaluator never sees the study. A job says which policy, on
which part of the text, up to which token; going on with the policy of the job before is cheap.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, OutOfMemory
from kvsearch.evaluate.quality import Evaluator, check_finite
from kvsearch.evaluate.replay import Replay
from kvsearch.models.load import load_model
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


class Work(Protocol):
    """How an evaluator comes to be; picklable, so that another process can open it."""

    def open(self, slot: int) -> Session:
        """Load what is needed on the device of `slot`."""


@dataclass(frozen=True, eq=False)
class ModelWork:
    """Evaluates on a language model that each slot loads for itself.

    Attributes:
        model, dtype, batch: as in `load_model` and `Evaluator`.
        devices: slot i uses `devices[i % len]`.
        parts: token windows `[W, T]` by name.
        threads: CPU threads of one slot; 0 leaves torch's default.
    """

    model: str
    dtype: str
    devices: tuple[str, ...]
    parts: Mapping[str, NDArray[np.int64]]
    batch: int = 1
    threads: int = 0

    def open(self, slot: int) -> "ModelSession":
        """Load the model on the slot's device."""
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        device = self.devices[slot % len(self.devices)]
        loaded = load_model(self.model, dtype=self.dtype, device=device, announce=lambda _: None)
        return ModelSession(Evaluator(loaded, self.batch), self.parts)


class ModelSession:
    """A loaded model and the text parts; keeps the last replay, so that a trial can go on."""

    def __init__(self, evaluator: Evaluator, parts: Mapping[str, NDArray[np.int64]]) -> None:
        self.evaluator, self.parts = evaluator, parts
        self._last: tuple[str, Policy, Replay] | None = None

    def run(self, job: Job) -> Measured:
        """Evaluate one job, going on from the last one where that is the same policy and part."""
        windows = self.parts[job.part]
        if self._last is not None and self._last[:2] == (job.part, job.policy):
            replay = self._last[2]
        else:
            self._last = None  # frees the old caches first
            replay = self.evaluator.replay(job.policy, windows)
        before = replay.spent
        nll = replay.to(job.stop)
        check_finite(job.policy.name or "policy", nll)
        held = replay.bytes_resident() if job.resident else 0
        last = job.stop == windows.shape[1]
        self._last = None if last else (job.part, job.policy, replay)
        return Measured(nll, replay.spent - before, held, replay.impls)


def attempt(session: Session, job: Job) -> Outcome:
    """Run a job; whatever happens is an outcome, and the session stays usable."""
    start = time.perf_counter()

    def ended(status: Status, measured: Measured | None = None, error: str = "") -> Outcome:
        return Outcome(job.key, status, measured, error, time.perf_counter() - start)

    try:
        return ended("ok", session.run(job))
    except (OutOfMemory, MemoryError) as e:
        _forget(session)
        return ended("oom", error=str(e) or "out of memory")
    except KvsearchError as e:
        _forget(session)
        return ended("failed", error=str(e))
    except Exception as e:  # a fault of ours must not end the study
        _forget(session)
        text = " ".join(str(e).split())[:300]
        if "out of memory" in text or "can't allocate memory" in text:  # torch's own RuntimeErrors
            return ended("oom", error=text)
        if os.environ.get("KVSEARCH_DEBUG"):
            raise
        return ended("failed", error=f"{type(e).__name__}: {text}")


def _forget(session: Session) -> None:
    """Drop what a failed job left, so that the next one has all the memory."""
    if isinstance(session, ModelSession):
        session._last = None
        if session.evaluator.loaded.device.startswith("cuda"):
            import torch

            torch.cuda.empty_cache()
