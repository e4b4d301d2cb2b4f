"""A search over a toy: losses follow from the policy, every evaluation is written down.

As a script it runs (or resumes) a search in a folder, to be killed by tests:

    python toy.py FOLDER --trials 40 --workers 2

What only drivers need is imported where they use it: evaluators that are killed come back faster.
"""

import argparse
import os
import signal
import sys
import time
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvsearch.errors import KvsearchError
from kvsearch.policy import HeadLosses, ModelShape, Policy
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.policy_space import load as load_space
from kvsearch.results.measurement import Measurement

if TYPE_CHECKING:
    from kvsearch.policy_search.admission import Task
    from kvsearch.policy_search.executors import Executor
    from kvsearch.results.records import Trial

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=4)
TOKENS, FROM, WINDOWS = 512, 64, 2  # two windows: policies start on the first
GROWN = 6  # windows of a longer search text
HEADS = HeadLosses(
    heads=2, sizes=(16, 64), slots=tuple((0.2 * i, 0.01 * i) for i in range(1, 9)), bits=(8, 4),
    keys=((0.0, 0.1),) * 8, values=((0.0, 0.1),) * 8, starved=16,
)  # fmt: skip
SETTING = Setting(SHAPE, SHAPE.budget_bytes(96), TOKENS, heads=HEADS)
DEFAULT = load_space("default")
# without the axis that needs the keys of a model, and the bits that came after a file of jobs
TIERS = DEFAULT.axes["tiers"]
TIERS = TIERS.model_copy(update={"choice": tuple(x for x in TIERS.choice or () if x != "k3v2")})
SPACE = DEFAULT.model_copy(
    update={"axes": {k: v for k, v in DEFAULT.axes.items() if k != "offset"} | {"tiers": TIERS}}
)


def loss(policy: Policy) -> float:
    """Nats per token over the full cache; falls with slots and bits."""
    if policy.slots is None:
        return 0.0
    bits = sum(t.share * (t.key_bits + 0.5 * t.value_bits) for t in policy.tiers)
    score = 0.0 if policy.rule is None else 0.2 + 0.1 * policy.rule.beta
    return 8.0 / policy.slots * (1.2 - score) + 0.1 / bits + 0.002 * log2(1 + policy.interval)


def nll(policy: Policy, windows: int, stop: int, first: int = 0) -> np.ndarray:
    """NLL `[windows, stop - 1]`: the text's difficulty, the policy's loss, and its own noise."""
    size = (GROWN, TOKENS - 1)
    text = np.random.default_rng(0).gamma(2.0, 1.5, size)
    own = np.random.default_rng(int(policy.fingerprint(SHAPE.layers), 16) % 2**32)
    noise = 0.1 * own.standard_normal(size) * (policy.slots is not None)
    return (text + loss(policy) + noise)[first : first + windows, : stop - 1].astype(np.float32)


def kills_late(policy: Policy) -> bool:
    """A quarter of the policies with a rule, so that some of every front are among them."""
    return policy.rule is not None and policy.fingerprint(SHAPE.layers)[-1] in "048c"


@dataclass(frozen=True)
class Toy:
    """Work that writes `PID WHAT KEY FINGERPRINT TOKENS` for every evaluation.

    Attributes:
        log: where.
        seconds: of one evaluation.
        bad: how some policies misbehave: `kill`, `nan`, `raise`, `oom`, or
            `kill-late` for a kill on other text than the search's.
    """

    log: Path
    seconds: float = 0.02
    bad: str = ""

    def open(self, slot: int) -> "Session":
        return Session(self)


class Session:
    def __init__(self, toy: Toy) -> None:
        self.toy, self.forgot = toy, 0

    def _misbehaves(self, policy: Policy) -> bool:
        """Where heads vote together; and where ranks are smoothed, unless that kills."""
        if self.toy.bad == "kill-late":
            return kills_late(policy)
        rule = policy.rule
        if rule is None or self.toy.bad.startswith("kill"):
            return rule is not None and rule.share == "layer"
        return rule.share == "layer" or getattr(rule, "pool", 1) > 1

    def run(self, job: Job) -> Measurement:
        self._write("start", job)
        time.sleep(self.toy.seconds)
        found = nll(job.policy, _windows(job), TOKENS, job.first)
        if self.toy.bad and self._misbehaves(job.policy):
            if self.toy.bad == "kill" or (self.toy.bad == "kill-late" and job.part != "search"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.toy.bad == "raise":
                raise ZeroDivisionError("as planned")
            if self.toy.bad == "oom":
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if self.toy.bad in ("nan", "inf"):
                found[:] = float(self.toy.bad)
        self._write("end", job)
        return Measurement(found, _windows(job) * TOKENS)

    def forget(self) -> None:
        self.forgot += 1

    def _write(self, what: str, job: Job) -> None:
        key = job.policy.fingerprint(SHAPE.layers)
        tokens = f"{_windows(job) * TOKENS}{f'from{job.first}' if job.first else ''}"
        self._say(what, job.key, key, tokens)

    def _say(self, *words: object) -> None:
        with open(self.toy.log, "a") as f:
            f.write(" ".join(map(str, (os.getpid(), *words))) + "\n")


def _windows(job: Job) -> int:
    return WINDOWS if job.windows is None else job.windows


def task(trials: int, sampler: str = "tpe", seed: int = 3, **more: object) -> "Task":
    from kvsearch.policy_search.admission import Task
    from kvsearch.policy_search.samplers import make_sampler

    make = make_sampler(sampler, SPACE, SETTING)
    return Task(SETTING, FROM, SPACE, trials, seed, make, **{"windows": WINDOWS, **more})


def searched(folder: Path, session: Session, what: "Task") -> "list[Trial]":
    """The trials of a search, or of the rest of one, in this process."""
    from kvsearch.policy_search.driver import Search
    from kvsearch.policy_search.executors.inline import Inline
    from kvsearch.results.folder import RunFolder

    run = RunFolder(folder)
    try:
        return Search(what, Inline(session), run, lambda *_: None).run()
    finally:
        run.close()


def main(options: list[str] | None = None) -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("folder", type=Path)
    ask.add_argument("--trials", type=int, default=40)
    ask.add_argument("--workers", type=int, default=0)
    ask.add_argument("--ray", default="", help="address, or local")
    ask.add_argument("--seconds", type=float, default=0.02)
    ask.add_argument("--bad", default="")
    ask.add_argument("--final", action="store_true", help="choose and report, too")
    ask.add_argument("--windows", type=int, default=WINDOWS, help="of the search text")
    ask.add_argument("--together", type=int, default=1, help="windows that policies start on")
    ask.add_argument("--sampler", default="tpe")
    ask.add_argument("--log", type=Path)
    o = ask.parse_args(options)
    # the module's importable name, so that a spawned process finds it again
    import toy

    from kvsearch.policy_search.driver import Search
    from kvsearch.policy_search.executors.inline import Inline
    from kvsearch.policy_search.executors.processes import Processes
    from kvsearch.results.folder import RunFolder

    work = toy.Toy(o.log or o.folder.with_suffix(".log"), o.seconds, o.bad)
    executor: Executor | None = None
    try:
        folder = RunFolder(o.folder)
        if o.ray:
            from kvsearch.policy_search.executors.ray_actors import RayActors

            executor = RayActors(work, o.workers, o.ray)
        elif o.workers:
            executor = Processes(work, o.workers)
        else:
            executor = Inline(work.open(0))
        what = task(o.trials, o.sampler, windows=o.windows, together=o.together)
        trials = Search(what, executor, folder, lambda *_: None).run()
        if o.final:
            from kvsearch.run.final_evaluation import FinalEvaluation
            from kvsearch.session.progress import Shown

            windows = dict.fromkeys(("select1", "report"), WINDOWS)
            final = FinalEvaluation(folder, executor, SETTING, FROM, Shown(), {}, windows)
            (o.folder / "measured.json").write_text(final.go(trials).text())
        folder.close()
    except KvsearchError as e:
        print(f"kvsearch: {e}", file=sys.stderr)
        sys.exit(2)
    finally:
        if executor is not None:
            executor.close()


if __name__ == "__main__":
    main()
