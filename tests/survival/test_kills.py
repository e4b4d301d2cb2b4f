"""kill -9 of evaluators at random moments: nothing is lost, nothing done twice."""

import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import KILLS, RAY_KILLS, calm, ends, outcomes
from toy import WINDOWS, Toy, task

from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.executors.ray_actors import RayActors
from kvsearch.results.attempts import ATTEMPTS
from kvsearch.results.folder import RunFolder
from kvsearch.results.journal import Journal
from kvsearch.results.records import Trial

SECONDS = 0.03  # of one evaluation


class Killer(threading.Thread):
    """Kills evaluators that were heard of, one at a time, at random moments.

    Attributes:
        flying: how often each fingerprint was with an evaluator when that was killed.
    """

    def __init__(self, log: Path, folder: Path, kills: int) -> None:
        super().__init__(daemon=True)
        self.log, self.kills, self.done = log, kills, 0
        self.journal = Journal(folder / "trials.jsonl", mend=False)
        self.rng, self.dead, self.over = random.Random(7), set[int](), False
        self.flying: Counter[str] = Counter()

    def run(self) -> None:
        while self.done < self.kills and not self.over:
            self._wait_for(self._at_work)
            time.sleep(self.rng.uniform(0, 8 * SECONDS))
            # A third kill of the same trial would make it a failed one; `test_blame` has those.
            if any(t.state == "running" and t.attempt >= ATTEMPTS for t in self.journal.read()):
                continue
            pid = self._at_work()
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # the search is over
            self.dead.add(pid)
            self.done += 1
            self.flying[[w[3] for w in self._lines() if int(w[0]) == pid][-1]] += 1

    def _wait_for(self, what) -> None:
        while not what() and not self.over:
            time.sleep(0.005)

    def _at_work(self) -> int:
        """Process id of the last live writer, or 0; five evaluations have to end first.

        The full cache comes first, and is given up after three kills.
        """
        lines = self._lines()
        if sum(w[1] == "end" for w in lines) < 5:
            return 0
        return next((p for w in lines[:-7:-1] if (p := int(w[0])) not in self.dead), 0)

    def _lines(self) -> list[list[str]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [w for w in map(str.split, text.splitlines()) if len(w) == 5]


def survive(
    executor: Executor, log: Path, folder: Path, kills: int
) -> tuple[list[Trial], int, Counter[str]]:
    """Search for 20 trials more and more until the killer is done; also how many that were."""
    killer = Killer(log, folder, kills)
    run = RunFolder(folder)
    killer.start()
    trials, wanted = [], 0
    try:
        while killer.done < kills:
            wanted += 20
            what = task(wanted, together=WINDOWS)  # more trials change no others
            trials = Search(what, executor, run, lambda *_: None).run()
    finally:
        killer.over = True
        killer.join()
        executor.close()
        run.close()
    assert killer.done == kills
    return trials, wanted, killer.flying


def check(trials: list[Trial], log: Path, folder: Path, flying: Counter[str]) -> None:
    done = [t for t in trials if t.state == "complete"]
    assert len({t.fingerprint for t in done}) == len(done) >= 20
    assert {t.windows for t in done} == {WINDOWS}
    mine = sorted((t.number, t.name, t.state, t.fingerprint, t.nll) for t in trials)
    assert outcomes(folder) == mine
    for t in trials:
        if t.state == "failed":
            assert t.attempt == ATTEMPTS, t
    for (key, _), times in ends(log).items():
        assert times <= 1 + flying[key]  # only what was in flight was evaluated again


@pytest.fixture(params=["processes", pytest.param("ray", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def make(kind: str, work: Toy, slots: int, request: pytest.FixtureRequest) -> tuple[Executor, int]:
    """An executor, and how often its evaluators are to be killed."""
    if kind == "processes":
        return Processes(work, slots), KILLS
    return RayActors(work, slots, request.getfixturevalue("address")), RAY_KILLS


def test_the_evaluator_is_killed_and_the_run_ends_like_an_uninterrupted_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    executor, kills = make(kind, Toy(log, SECONDS), 1, request)
    trials, wanted, flying = survive(executor, log, folder, kills)
    check(trials, log, folder, flying)
    assert outcomes(folder) == calm(tmp_path, wanted)  # losses and with them the front, too


@pytest.mark.slow
def test_one_of_two_evaluators_is_killed(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    executor, kills = make(kind, Toy(log, SECONDS), 2, request)
    trials, _, flying = survive(executor, log, folder, max(5, kills // 5))
    check(trials, log, folder, flying)
