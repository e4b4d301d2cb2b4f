"""kill -9 of the driver at random moments: the same command goes on, and no process is left."""

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import KILLS, RAY_KILLS, Fork, calm, ends, outcomes
from toy import SHAPE, WINDOWS

from kvsearch.policy import Policy
from kvsearch.policy_search.executors.cluster import Cluster

FULL = Policy().fingerprint(SHAPE.layers)
EARLY = {"inline": 0.1, "processes": 0.8, "ray": 1.5}  # seconds in which a driver comes up


def interrupt(
    fork: Fork, folder: Path, kills: int, early: float, *options: str
) -> tuple[int, Counter[str]]:
    """Kill the driver again and again, for as many trials as that takes; then let it finish.

    Every third kill comes at any time from the start on, the others after the driver got somewhere,
    so that no trial is in flight at three kills and given up.

    Returns:
        The number of trials, and how often each fingerprint was in flight at a kill.
    """
    rng, journal, done, trials = random.Random(11), folder / "trials.jsonl", 0, 20
    flying: Counter[str] = Counter()
    over: dict[int, tuple] = {}  # by number, every trial that had ended before some kill

    def lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    while True:
        child = fork(folder, "--trials", str(trials), *options)
        goal, until = lines() + rng.randint(3, 6), time.monotonic() + rng.uniform(0, early)
        soon = done % 3 == 2
        while child.poll() is None and done < kills:
            if (time.monotonic() >= until) if soon else (lines() >= goal):
                time.sleep(rng.uniform(0, 0.05))
                child.kill()
                done += 1
                break
            time.sleep(0.005)
        _, err = child.communicate(timeout=240)
        found = outcomes(folder)
        assert over.items() <= {o[0]: o for o in found}.items()  # no completed trial is lost
        over = {o[0]: o for o in found if o[2] != "running"}
        if child.returncode == 0 and done == kills:
            return trials, flying
        if child.returncode == 0:
            trials += 20
            continue
        assert child.returncode == -signal.SIGKILL, err
        flying += Counter(key for _, _, state, key, _ in found if state == "running")
        if not list(folder.glob(f"nll/search-{FULL}.*")):
            flying[FULL] += 1


def check(log: Path, flying: Counter[str], address: str) -> None:
    """Only what was in flight was evaluated again, and no evaluator outlives its driver."""
    for (key, _), times in ends(log).items():
        assert times <= 1 + flying[key]
    pids = {int(line.split()[0]) for line in log.read_text().splitlines()}
    wait_for(lambda: not [p for p in pids if Path(f"/proc/{p}").exists()], "orphans")
    if address:
        cluster = Cluster(address, 0)
        ray = cluster.ray  # an actor, at work or waiting for a place, would hold its CPU
        try:
            wait_for(lambda: ray.available_resources().get("CPU") == cluster.has("CPU"), "actors")
        finally:
            cluster.close()


def wait_for(what, otherwise: str) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def options(where: str, workers: int, address: str) -> list[str]:
    """Of a toy run whose policies start on all windows, so that more trials change no others."""
    how = {"inline": [], "processes": ["--workers", str(workers)]}
    whole = ["--together", str(WINDOWS)]
    return [*whole, *how.get(where, ["--workers", str(workers), "--ray", address])]


@pytest.mark.parametrize(
    "where", ["inline", *(pytest.param(x, marks=pytest.mark.slow) for x in ("processes", "ray"))]
)
def test_the_driver_is_killed_and_ends_like_an_uninterrupted_one(
    where: str, fork: Fork, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    address = request.getfixturevalue("address") if where == "ray" else ""
    folder, kills = tmp_path / "run", RAY_KILLS if address else KILLS
    how = ["--seconds", "0.01", *options(where, 1, address)]
    trials, flying = interrupt(fork, folder, kills, EARLY[where], *how)
    assert outcomes(folder) == calm(tmp_path, trials)  # losses and with them the front, too
    check(tmp_path / "run.log", flying, address)


@pytest.mark.slow
def test_the_driver_of_two_is_killed_and_leaves_no_orphans(fork: Fork, tmp_path: Path) -> None:
    """Two actors of Ray are in `test_blame.py`."""
    folder = tmp_path / "run"
    how = ["--seconds", "0.03", *options("processes", 2, "")]
    trials, flying = interrupt(fork, folder, max(5, KILLS // 5), EARLY["processes"], *how)
    found = outcomes(folder)
    assert sum(state in ("complete", "pruned") for _, _, state, _, _ in found) >= trials
    assert all(state != "running" for _, _, state, _, _ in found)
    check(tmp_path / "run.log", flying, "")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_policy_that_kills_is_tried_three_times(workers: str, fork: Fork, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "run.log"
    options = ["--trials", "6", "--workers", workers, "--seconds", "0", "--bad", "kill",
               "--together", str(WINDOWS)]  # fmt: skip
    codes = []
    while not codes or codes[-1]:
        child = fork(folder, *options)
        child.communicate(timeout=240)
        codes.append(child.returncode)
        assert len(codes) < 60
    assert (len(codes) == 1) is (workers == "2")  # in this process, it takes the driver along
    poison = {k for n, name, state, k, _ in outcomes(folder) if state == "failed"}
    assert poison
    starts = [line.split() for line in log.read_text().splitlines()]
    for key in poison:
        assert sum(w[1] == "start" and w[3] == key for w in starts) == 3
