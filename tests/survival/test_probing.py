"""Sensitivity over evaluators: every executor carries it, a kill costs one part, others end it."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from toy import Session, Toy

from kvsearch.errors import OutOfMemory, RunError
from kvsearch.evaluate.probes import Lost, Probe
from kvsearch.policy import Policy
from kvsearch.search.executors import Executor
from kvsearch.search.executors.inline import Inline
from kvsearch.search.executors.processes import Processes
from kvsearch.search.probing import over
from kvsearch.search.work import Job, Outcome, ProbeJob

QUESTION = Lost(Policy(), 0, 0)  # the toy answers with window and tokens
PROBES = [Probe(window, 100 + i, QUESTION) for window in range(3) for i in range(5)]
ANSWERS = [[probe.window, probe.tokens] for probe in PROBES]


def lines(log: Path) -> list[list[str]]:
    return [line.split() for line in log.read_text().splitlines()]


def evaluators(kind: str, toy: Toy, request: pytest.FixtureRequest) -> Executor:
    if kind == "ray":
        pytest.importorskip("ray")
        from kvsearch.search.executors.ray_actors import RayActors

        return RayActors(toy, 2, request.getfixturevalue("address"))
    return Processes(toy, 2)


def test_one_evaluator_answers_window_after_window(tmp_path: Path) -> None:
    toy, steps = Toy(tmp_path / "log", 0.0), list[int]()
    found = over(Inline(Session(toy)), "search")(PROBES, lambda: steps.append(1))
    assert [x.tolist() for x in found] == ANSWERS and len(steps) == len(PROBES)
    asked = [w[4] for w in lines(toy.log) if w[1] == "start"]
    assert asked == sorted(asked)  # so that it begins once per window


def kill_who_begins(log: Path, key: int) -> None:
    """kill -9 of the evaluator that the job is with, as soon as it has begun."""
    while True:
        for pid, what, job, *_ in lines(log) if log.exists() else ():
            if (what, job) == ("start", str(key)):
                os.kill(int(pid), signal.SIGKILL)
                return
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["processes", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_killed_evaluator_costs_its_part_alone(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, done = Toy(tmp_path / "log", 0.3), list[int]()
    executor = evaluators(kind, toy, request)
    submit, asked = executor.submit, Counter[int]()

    def deadly(slot: int, job: Job | ProbeJob) -> None:
        submit(slot, job)
        asked[job.key] += 1
        if asked.total() in (3, 9):
            kill_who_begins(toy.log, job.key)

    monkeypatch.setattr(executor, "submit", deadly)
    try:
        found = over(executor, "search")(PROBES, lambda: done.append(1))
    finally:
        executor.close()
    assert [x.tolist() for x in found] == ANSWERS and len(done) == len(PROBES)
    ends = Counter(w[2] for w in lines(toy.log) if w[1] == "end")
    assert set(ends.values()) == {1} and asked.total() == len(PROBES) + 2


class Short:
    """Two evaluators; the first answer says that memory is short while the other is computed."""

    slots = 2

    def __init__(self) -> None:
        self.busy: list[tuple[int, ProbeJob]] = []

    def submit(self, slot: int, job: ProbeJob) -> None:
        assert slot not in [s for s, _ in self.busy]
        self.busy.append((slot, job))

    def wait(self) -> tuple[int, Outcome]:
        slot, job = self.busy.pop(0)
        long = job.probe.tokens > 50
        return slot, Outcome(job.key, "oom" if long else "ok", error="no room", answer=None if long
                             else np.array([job.probe.tokens]))  # fmt: skip


def test_lack_of_memory_leaves_evaluators_free_for_smaller_probes() -> None:
    ask = over(Short(), "search")
    with pytest.raises(OutOfMemory, match="no room"):
        ask([Probe(0, 100, QUESTION)] * 3, lambda: None)
    assert ask([Probe(0, 50, QUESTION)] * 3, lambda: None) == [50, 50, 50]


def test_what_cannot_be_measured_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    killing = Toy(tmp_path / "kill", 0.0, "kill")
    executor = Processes(killing, 1)
    with pytest.raises(RunError, match="sensitivity cannot be measured: its evaluator died"):
        over(executor, "search")([Probe(1, 100, QUESTION)], lambda: None)
    executor.close()
    assert len(lines(killing.log)) == 3
    nan = Inline(Session(Toy(tmp_path / "nan", 0.0, "nan")))
    with pytest.raises(RunError, match="not finite"):
        over(nan, "search")(PROBES, lambda: None)
    assert np.isfinite(over(nan, "search")(PROBES[:5], lambda: None)).all()
