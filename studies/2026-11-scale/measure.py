"""Cost of the driver, and hypervolume with proposals made while others are not yet measured.

    python measure.py cost      # 1, 2, 4, 8 processes, evaluations of a second: driver's time
    python measure.py volume    # hypervolume with 1 and 8 evaluators at equal trials, simulated

Both append to results.csv. The objective is the toy of tests/survival, so this needs no model.
"""

import argparse
import contextlib
import csv
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "survival"))

import torch._dynamo  # noqa: E402, F401 - a driver that has loaded a model has it; it takes a second
import toy  # noqa: E402

from kvsearch.policy_search.driver import Search  # noqa: E402
from kvsearch.policy_search.executors import Executor  # noqa: E402
from kvsearch.policy_search.executors.processes import Processes  # noqa: E402
from kvsearch.policy_search.worker import Job, Outcome, attempt  # noqa: E402
from kvsearch.results.folder import RunFolder  # noqa: E402
from kvsearch.results.pareto import log_hypervolume as volume  # noqa: E402
from kvsearch.results.records import Trial  # noqa: E402


class Timed:
    """An executor that times its driver between two waits, without the start."""

    def __init__(self, inner: Executor) -> None:
        self.inner, self.slots = inner, inner.slots
        self.wall: list[float] = []  # seconds between the end of a wait and the next one
        self.cpu: list[float] = []
        self.last: tuple[float, float] | None = None

    def open(self) -> None:
        self.inner.open()

    def submit(self, slot: int, job: Job) -> None:
        self.inner.submit(slot, job)

    def wait(self) -> tuple[int, Outcome]:
        if self.last is not None:
            self.wall.append(time.perf_counter() - self.last[0])
            self.cpu.append(time.process_time() - self.last[1])
        found = self.inner.wait()
        self.last = time.perf_counter(), time.process_time()
        return found

    def close(self) -> None:
        self.inner.close()


class Simulated:
    """`slots` evaluators that take equally long: the job begun first ends first."""

    def __init__(self, session: toy.Session, slots: int) -> None:
        self.session, self.slots = session, slots
        self.jobs: deque[tuple[int, Job]] = deque()

    def open(self) -> None:
        pass

    def submit(self, slot: int, job: Job) -> None:
        self.jobs.append((slot, job))

    def wait(self) -> tuple[int, Outcome]:
        slot, job = self.jobs.popleft()
        return slot, attempt(self.session, job)

    def close(self) -> None:
        self.jobs.clear()


def search(executor: Executor, place: Path, **task: object) -> list[Trial]:
    folder = RunFolder(place / "run")
    try:
        return Search(toy.task(**task), executor, folder, lambda *_: None).run()
    finally:
        folder.close()
        executor.close()


@contextlib.contextmanager
def synced() -> Iterator[list[float]]:
    """Seconds of every fsync inside."""
    real, spent = os.fsync, []

    def timed(handle: int) -> None:
        start = time.perf_counter()
        real(handle)
        spent.append(time.perf_counter() - start)

    os.fsync = timed
    try:
        yield spent
    finally:
        os.fsync = real


def cost(slots: int, sampler: str, trials: int, seconds: float) -> dict[str, object]:
    """Seconds of the driver per evaluated trial, between an outcome and the next wait.

    Three times: wall-clock, which includes other jobs on the machine; CPU of the driver; and disk
    syncs. The median leaves out what happens once, such as imports.
    """
    with tempfile.TemporaryDirectory() as place:
        executor = Timed(Processes(toy.Toy(Path(place) / "log", seconds), slots))
        task = {"trials": trials, "sampler": sampler, "warm_start": False, "racing": False}
        with synced() as disk:
            done = search(executor, Path(place), **task)
    evaluated = sum(t.state in ("complete", "pruned", "failed") for t in done)
    return {
        "what": "cost", "sampler": sampler, "evaluators": slots, "trials": evaluated,
        "driver_s": round(sum(executor.wall[slots:]) / evaluated, 4),
        "driver_cpu_s": round(sum(executor.cpu[slots:]) / evaluated, 4),
        "driver_cpu_median_s": round(median(executor.cpu[slots:]), 4),
        "disk_s": round(sum(disk) / evaluated, 4),
    }  # fmt: skip


def reached(slots: int, sampler: str, trials: int, seed: int) -> float:
    """Hypervolume of the measured front after `trials` free proposals, methods left out."""
    with tempfile.TemporaryDirectory() as place:
        session = toy.Session(toy.Toy(Path(place) / "log", 0.0))
        done = search(
            Simulated(session, slots), Path(place),
            trials=trials, sampler=sampler, seed=seed, warm_start=False,
        )  # fmt: skip
    points = [(float(t.bytes_peak or 0), t.dnll or 0.0) for t in done if t.state == "complete"]
    return volume(points, float(toy.SETTING.budget_bytes or 0))


def add(rows: list[dict[str, object]]) -> None:
    file = HERE / "results.csv"
    names = ["what", "sampler", "evaluators", "trials", "seed", "driver_s",
             "driver_cpu_s", "driver_cpu_median_s", "disk_s", "volume"]  # fmt: skip
    new = not file.exists()
    with file.open("a", newline="") as f:
        out = csv.DictWriter(f, names, lineterminator="\n")
        if new:
            out.writeheader()
        out.writerows(rows)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("what", choices=["cost", "volume"])
    ask.add_argument("--sampler", default="tpe")
    ask.add_argument("--trials", type=int, default=60)
    ask.add_argument("--seconds", type=float, default=1.0, help="of one evaluation (cost)")
    ask.add_argument("--seeds", type=int, default=10)
    o = ask.parse_args()
    for slots in (1, 2, 4, 8) if o.what == "cost" else (1, 8):
        if o.what == "cost":
            rows = [cost(slots, o.sampler, o.trials, o.seconds)]
        else:
            rows = [
                {"what": "volume", "sampler": o.sampler, "evaluators": slots, "trials": o.trials,
                 "seed": s, "volume": round(reached(slots, o.sampler, o.trials, s), 5)}
                for s in range(1, o.seeds + 1)
            ]  # fmt: skip
        add(rows)
        print(rows, flush=True)


if __name__ == "__main__":
    main()
