"""How busy many evaluators are in a search with growing windows, and what idle ones wait for.

    python busy.py --evaluators 64 --trials 64,640 --sampler random   # evaluators on a clock
    python busy.py --evaluators 8 --trials 80 --processes             # processes that sleep

Appends to busy.csv. The objective is the toy of tests/survival; its evaluations take `--seconds` a
window on average, and one takes up to `--spread` more or less than another, as policies differ.
Evaluators on a clock work in no time; the driver's own CPU seconds pass on that clock, too.
"""

import argparse
import csv
import heapq
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import measure  # finds toy
import toy

from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.worker import Job, Outcome, attempt
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Trial

CAUSES = ("opening", "full_cache", "methods", "turns", "last_proposals", "levelling", "driver")
FIELDS = ("version", "clock", "sampler", "evaluators", "trials", "seed", "seconds", "spread",
          "time", "jobs", "busy", *CAUSES)  # fmt: skip


def length(job: Job, seconds: float, spread: float) -> float:
    """Seconds of a job; the same policy takes as long on every window."""
    share = int(job.policy.fingerprint(toy.SHAPE.layers)[:6], 16) / 0xFFFFFF
    return seconds * (job.windows or toy.WINDOWS) * (1 + spread * (2 * share - 1))


class Sleeps(toy.Session):
    """Takes as long as `length` says."""

    def __init__(self, work: "Work") -> None:
        super().__init__(toy.Toy(work.log, 0.0))
        self.work = work

    def run(self, job: Job) -> Measurement:
        time.sleep(length(job, self.work.seconds, self.work.spread))
        return super().run(job)


@dataclass(frozen=True)
class Work:
    """The toy with evaluations of different lengths, for processes."""

    log: Path
    seconds: float
    spread: float

    def open(self, slot: int) -> Sleeps:
        return Sleeps(self)


def cause(search: Search | None) -> str:
    """What an evaluator that is idle now waits for."""
    if search is None or not len(search.state.full):
        return "full_cache"
    kinds = {t.kind for t in search.state.under_way()}
    if kinds - {"searched"} or search.methods:
        return "methods"
    if search.proposals.wanted():
        return "turns"
    return "last_proposals" if kinds else "levelling"


class Idle:
    """Counts idle evaluator seconds by cause."""

    def __init__(self, slots: int) -> None:
        self.slots, self.search, self.jobs = slots, None, 0
        self.idle: Counter[str] = Counter()
        self.worked = 0.0

    def shares(self, lasted: float) -> dict[str, float]:
        """Of the time of all evaluators; what no wait explains is the driver's."""
        whole = lasted * self.slots
        found = {c: self.idle[c] / whole for c in CAUSES}
        found["driver"] = 1 - self.worked / whole - sum(found.values())
        return {"busy": self.worked / whole, **found}


class Clock(Idle):
    """Evaluators that work side by side on a clock."""

    def __init__(self, slots: int, seconds: float, spread: float, log: Path) -> None:
        super().__init__(slots)
        self.seconds, self.spread = seconds, spread
        self.session = toy.Session(toy.Toy(log, 0.0))
        self.ends: list[tuple[float, int, Outcome]] = []
        self.now, self.since = 0.0, time.process_time()

    @property
    def clock(self) -> float:
        return self.now + time.process_time() - self.since

    def _at(self, now: float) -> None:
        self.now, self.since = now, time.process_time()

    def open(self) -> None:
        pass

    def submit(self, slot: int, job: Job) -> None:
        now = self.clock
        took, outcome = length(job, self.seconds, self.spread), attempt(self.session, job)
        self.worked, self.jobs = self.worked + took, self.jobs + 1
        heapq.heappush(self.ends, (now + took, slot, outcome))
        self._at(now)  # answering takes no time

    def wait(self) -> tuple[int, Outcome]:
        now, (end, slot, outcome) = self.clock, self.ends[0]
        self.idle[cause(self.search)] += max(0.0, end - now) * (self.slots - len(self.ends))
        heapq.heappop(self.ends)
        self._at(max(now, end))
        return slot, outcome

    def close(self) -> None:
        pass


class Watched(Idle):
    """Processes; time passes by itself, and what a job took beyond its own seconds is opening."""

    def __init__(self, slots: int, seconds: float, spread: float, log: Path) -> None:
        super().__init__(slots)
        import busy  # the module's importable name, so that a spawned process finds it again

        self.inner = Processes(busy.Work(log, seconds, spread), slots)
        self.begun: dict[int, float] = {}
        self.start = time.perf_counter()

    @property
    def clock(self) -> float:
        return time.perf_counter() - self.start

    def open(self) -> None:
        self.inner.open()

    def submit(self, slot: int, job: Job) -> None:
        self.begun[slot], self.jobs = self.clock, self.jobs + 1
        self.inner.submit(slot, job)

    def wait(self) -> tuple[int, Outcome]:
        before, why, free = self.clock, cause(self.search), self.slots - len(self.begun)
        slot, outcome = self.inner.wait()
        self.idle[why] += (self.clock - before) * free
        self.idle["opening"] += self.clock - self.begun.pop(slot) - outcome.seconds
        self.worked += outcome.seconds
        return slot, outcome

    def close(self) -> None:
        self.inner.close()


def one(o: argparse.Namespace, trials: int, seed: int) -> dict[str, object]:
    """A search, and its row."""
    with tempfile.TemporaryDirectory() as place:
        kind = Watched if o.processes else Clock
        executor = kind(o.evaluators, o.seconds, o.spread, Path(place) / "log")
        folder = RunFolder(Path(place) / "run")
        task = toy.task(trials, o.sampler, seed, growing=True, racing=False)
        search = Search(task, executor, folder, lambda *_: None)
        executor.search = search
        done: list[Trial] = search.run()
        lasted = executor.clock
        folder.close()
        executor.close()
    assert sum(t.kind == "searched" and t.state == "complete" for t in done) == trials
    row = {
        "version": o.version, "clock": "processes" if o.processes else "simulated",
        "sampler": o.sampler, "evaluators": o.evaluators, "trials": trials, "seed": seed,
        "seconds": o.seconds, "spread": o.spread, "time": lasted, "jobs": executor.jobs,
    }  # fmt: skip
    return row | executor.shares(lasted)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--evaluators", type=int, default=64)
    ask.add_argument("--trials", default="640", help="free proposals; several with commas")
    ask.add_argument("--sampler", default="random")
    ask.add_argument("--seeds", default="1-3")
    ask.add_argument("--seconds", type=float, default=4.0, help="of a window")
    ask.add_argument("--spread", type=float, default=0.5, help="of the lengths, as a share")
    ask.add_argument("--processes", action="store_true", help="processes that sleep")
    ask.add_argument("--version", default="now", help="what the row is called")
    ask.add_argument("--out", type=Path, default=measure.HERE / "busy.csv")
    o = ask.parse_args()
    low, high = (int(s) for s in o.seeds.split("-"))
    for trials in (int(t) for t in o.trials.split(",")):
        for seed in range(low, high + 1):
            row = one(o, trials, seed)
            new = not o.out.exists()
            with o.out.open("a", newline="") as f:
                out = csv.DictWriter(f, FIELDS, lineterminator="\n")
                if new:
                    out.writeheader()
                out.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
