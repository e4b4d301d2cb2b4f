"""kill -9 at random moments, of evaluators and of the driver: nothing is lost, nothing twice."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from conftest import KILLS, RAY_KILLS, ends, outcomes, start
from toy import Toy, task

from kvsearch.search.driver import Search
from kvsearch.search.executors import Executor
from kvsearch.search.executors.processes import Processes
from kvsearch.search.folder import RunFolder


class Killer(threading.Thread):
    """Kills evaluators that are at work, one at a time, at random moments."""

    def __init__(self, log: Path, kills: int, pause: tuple[float, float]) -> None:
        super().__init__(daemon=True)
        self.log, self.kills, self.pause, self.done = log, kills, pause, 0
        self.rng, self.dead, self.over = random.Random(7), set[int](), False

    def run(self) -> None:
        while self.done < self.kills and not self.over:
            time.sleep(self.rng.uniform(*self.pause))
            text = self.log.read_text() if self.log.exists() else ""
            words = [w for w in map(str.split, text.splitlines()) if len(w) == 5]
            if sum(w[1] == "end" for w in words) < 5:
                continue  # the full cache comes first, and is given up after three kills
            alive = {int(w[0]) for w in words[-6:]} - self.dead
            for pid in sorted(alive)[-1:]:
                self.dead.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                    self.done += 1
                except ProcessLookupError:
                    continue


def survive(executor: Executor, log: Path, folder: Path, kills: int, pause: tuple[float, float]):
    """Search until the killer has killed often enough; a fifth of the kills are trials more."""
    killer = Killer(log, kills, pause)
    run = RunFolder(folder)
    killer.start()
    trials, wanted = [], 20
    try:
        while killer.done < kills:
            trials = Search(task(wanted), executor, run, lambda *_: None).run()
            wanted += 20
    finally:
        killer.over = True
        executor.close()
        run.close()
    return trials


def check(trials, log: Path, folder: Path, kills: int) -> None:
    done = [t for t in trials if t.state in ("complete", "pruned")]
    assert len({t.fingerprint for t in done}) == len(done) >= 20
    mine = sorted((t.number, t.name, t.state, t.fingerprint, t.nll) for t in trials)
    assert outcomes(folder) == mine
    for t in trials:
        if t.state == "failed":
            assert t.attempt == 3, t
    again = sum(n - 1 for n in ends(log).values())
    assert again <= kills  # only what was in flight was evaluated again


def test_evaluators_are_killed(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    executor = Processes(Toy(log, 0.05), 2)
    trials = survive(executor, log, folder, KILLS, (0.2, 0.9))
    check(trials, log, folder, KILLS)


def test_ray_actors_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from kvsearch.search.executors.ray_actors import RayActors

    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    log, folder = tmp_path / "log", tmp_path / "run"
    trials = survive(RayActors(Toy(log, 0.1), 2, "local"), log, folder, RAY_KILLS, (0.1, 0.9))
    check(trials, log, folder, RAY_KILLS)


def interrupt(folder: Path, kills: int, *options: str) -> int:
    """Kill the driver again and again, each time after it got somewhere; then let it finish."""
    rng, journal, done = random.Random(11), folder / "trials.jsonl", 0
    while True:
        before = journal.read_bytes().count(b"\n") if journal.exists() else 0
        wait_for = before + rng.randint(3, 6)  # so that no trial is in flight at three kills
        child = start(folder, *options)
        while child.poll() is None and done < kills:
            lines = journal.read_bytes().count(b"\n") if journal.exists() else 0
            if lines >= wait_for:
                time.sleep(rng.uniform(0, 0.05))
                child.kill()
                done += 1
                break
            time.sleep(0.005)
        _, err = child.communicate(timeout=240)
        if child.returncode == 0:
            return done
        assert child.returncode == -signal.SIGKILL, err


def test_the_driver_is_killed_and_ends_like_an_uninterrupted_one(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    kills = interrupt(folder, KILLS, "--trials", "60", "--seconds", "0.01")
    assert kills >= min(KILLS, 20)
    assert outcomes(folder) == outcomes(uninterrupted)
    assert sum(n - 1 for n in ends(tmp_path / "run.log").values()) <= kills


def test_the_driver_of_processes_is_killed_and_leaves_no_orphans(tmp_path: Path) -> None:
    folder, kills = tmp_path / "run", max(5, KILLS // 5)
    done = interrupt(folder, kills, "--trials", "60", "--workers", "2", "--seconds", "0.03")
    assert done == kills
    found = outcomes(folder)
    assert sum(state in ("complete", "pruned") for _, _, state, _, _ in found) >= 60
    assert all(state != "running" for _, _, state, _, _ in found)
    assert sum(n - 1 for n in ends(tmp_path / "run.log").values()) <= 2 * kills
    pids = {int(line.split()[0]) for line in (tmp_path / "run.log").read_text().splitlines()}
    time.sleep(1.0)
    assert not [p for p in pids if Path(f"/proc/{p}").exists()]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_policy_that_kills_is_tried_three_times(workers: str, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    options = ["--trials", "6", "--workers", workers, "--seconds", "0", "--bad", "kill"]
    codes = []
    while not codes or codes[-1]:
        child = start(folder, *options)
        child.communicate(timeout=240)
        codes.append(child.returncode)
        assert len(codes) < 60
    assert (len(codes) == 1) is (workers == "2")  # in this process, it takes the driver along
    poison = {k for n, name, state, k, _ in outcomes(folder) if state == "failed"}
    assert poison
    starts = [line.split() for line in log.read_text().splitlines()]
    for key in poison:
        assert sum(w[1] == "start" and w[3] == key for w in starts) == 3
