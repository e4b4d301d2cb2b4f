"""A cheap evaluator that is always right, writes down what it does, and fails where it is told to.

Its NLL is a function of the policy alone, so every run of the same task must find the same.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvsearch.errors import KvsearchError
from kvsearch.knobs import Setting
from kvsearch.policy import ModelShape, Policy
from kvsearch.records import Trial
from kvsearch.search.driver import Task
from kvsearch.search.executors import Executor
from kvsearch.search.executors.inline import Inline
from kvsearch.search.samplers import make_sampler
from kvsearch.search.work import Job, Measured
from kvsearch.space import load as load_space

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=4)
TOKENS, START = 1024, 128
SETTING = Setting(SHAPE, SHAPE.budget_bytes(128), TOKENS, (1.6, 1.2, 0.8, 0.4))


def task(trials: int, *, seed: int = 1, sampler: str = "random", warm: bool = True) -> Task:
    """A search over the shipped space."""
    space = load_space("default")
    make = make_sampler(sampler, space, SETTING)
    return Task(SETTING, START, space, trials, seed, make, warm=warm)


def level(policy: Policy) -> float:
    """Nats per token that a policy loses: fewer slots and fewer bits lose more."""
    if policy.slots is None and all(t.key_bits == t.value_bits == 16 for t in policy.tiers):
        return 0.0
    bits = sum(t.share * (t.key_bits + t.value_bits) / 2 for t in policy.tiers)
    slots = policy.slots or TOKENS
    luck = int(policy.fingerprint(SHAPE.layers)[:6], 16) / 2**24  # 0 to 1
    scored = 0.6 if policy.score is not None else 1.0
    return 30 * scored / slots + 0.4 * 2.0 ** (3 - bits) + 0.05 * luck


@dataclass(frozen=True)
class FakeWork:
    """What `ModelWork` is to a model.

    Attributes:
        log: every open, start and end is a line of this file.
        seconds: how long a job takes.
        faults: trial number -> kill, nan, inf, raise, memory, torch or cuda.
        oom_slots: policies with more slots run out of memory.
        refuse: `open` fails with this sentence.
    """

    log: str
    seconds: float = 0.0
    faults: Mapping[str, str] = field(default_factory=dict)
    oom_slots: int = 1 << 30
    refuse: str = ""

    def open(self, slot: int) -> "FakeSession":
        if self.refuse:
            raise KvsearchError(self.refuse)
        self.say("open", slot)
        return FakeSession(self)

    def say(self, *words: object) -> None:
        handle = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(handle, (json.dumps([os.getpid(), *words]) + "\n").encode())
        os.close(handle)


class FakeSession:
    """Answers jobs; `forgotten` counts the failures it was told to clean up after."""

    def __init__(self, work: FakeWork) -> None:
        self.work, self.forgotten = work, 0
        self.common = np.random.default_rng(0).gamma(2.0, 1.5, TOKENS - 1)

    def run(self, job: Job) -> Measured:
        key = job.policy.fingerprint(SHAPE.layers)
        self.work.say("start", job.part, key, job.stop)
        time.sleep(self.work.seconds)
        full = level(job.policy) == 0.0
        kind = "" if full else self.work.faults.get(str(job.key), "")
        if (job.policy.slots or 0) > self.work.oom_slots:
            kind = "cuda"
        nll = self._nll(job, key)
        match kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan" | "inf":
                nll[0, 5] = float(kind)
            case "raise":
                raise ValueError("no such thing")
            case "memory":
                raise MemoryError
            case "torch":
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            case "cuda":
                import torch

                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.work.say("end", job.part, key, job.stop)
        return Measured(nll, nll.size + 1, 1, {"fake": "numpy"})

    def _nll(self, job: Job, key: str) -> np.ndarray:
        own = np.random.default_rng(int(key, 16)).standard_normal(TOKENS - 1)
        mean = level(job.policy)
        nll = self.common + mean + 0.1 * own * (mean > 0)
        return nll[None, : job.stop - 1].astype(np.float32)

    def forget(self) -> None:
        self.forgotten += 1


def executor(kind: str, slots: int, work: FakeWork) -> Executor:
    """One of the three."""
    if kind == "inline":
        return Inline(work.open(0))
    if kind == "processes":
        from kvsearch.search.executors.processes import Processes

        return Processes(work, slots)
    from kvsearch.search.executors.ray_actors import RayActors

    return RayActors(work, slots, "local")


def log(file: Path) -> list[list]:
    """What the evaluators wrote."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def essence(trials: list[Trial]) -> list[tuple]:
    """What must not depend on kills: everything but seconds and attempts."""
    return [
        (t.number, t.name, t.state, t.fingerprint, t.nll, t.dnll, t.bytes_peak, t.tokens, t.rungs)
        for t in trials
    ]
