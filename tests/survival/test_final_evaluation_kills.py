"""kill -9 during the final evaluation: by chance it costs nothing, by a policy that policy."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import Fork
from toy import SETTING, SHAPE, Session, Toy, kills_late, nll

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.fixed_list import measure
from kvsearch.policy_search.worker import Job
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement

FULL, OTHER = Policy(), Policy(slots=40, name="other")
KEY = OTHER.fingerprint(SHAPE.layers)


def ended(fork: Fork, folder: Path, *options: str) -> tuple[int, dict]:
    """Run it, again and again if it kills its driver; how often, and what was measured."""
    for times in range(1, 60):
        child = fork(folder, "--trials", "60", "--final", *options)
        _, err = child.communicate(timeout=240)
        if not child.returncode:
            return times, json.loads((folder / "measured.json").read_text())
        assert child.returncode == -signal.SIGKILL, err
    raise AssertionError("it never ends")


def rows(found: dict) -> list[tuple[str, str]]:
    return [(row["name"], row["fingerprint"]) for row in found["rows"]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_policy_that_kills_the_final_evaluation_is_left_out(
    workers: str, uninterrupted: Path, fork: Fork, tmp_path: Path
) -> None:
    folder, log = tmp_path / "run", tmp_path / "late.log"
    shutil.copytree(uninterrupted, folder)
    trials = RunFolder(folder, write=False).trials()
    poison = {t.fingerprint for t in trials if kills_late(t.policy)}
    how = ["--seconds", "0", "--workers", workers, "--log", str(log), "--bad", "kill-late"]
    times, found = ended(fork, folder, *how)
    assert (times == 1) is (workers == "2")  # in this process, it takes the driver along
    assert found["dropped"] and found["recommended"]
    assert not poison & {key for _, key in rows(found)}
    lines = [line.split() for line in log.read_text().splitlines()]
    starts = Counter((w[3], w[4]) for w in lines if w[1] == "start")  # of each job
    tried = {key: {n for (k, _), n in starts.items() if k == key} for key, _ in starts}
    assert all(max(n) in (3, 6) for key, n in tried.items() if key in poison)  # on one part, or two
    assert all(max(n) <= 2 for key, n in tried.items() if key not in poison | in_flight(lines))


def in_flight(lines: list[list[str]]) -> set[str]:
    """Fingerprints that a driver which died had begun and not ended."""
    begun: Counter[tuple[str, str]] = Counter()
    for pid, what, _, key, _ in lines:
        begun[pid, key] += 1 if what == "start" else -1
    return {key for (_, key), n in begun.items() if n}


@pytest.mark.slow
def test_kills_by_chance_change_nothing_in_the_final_evaluation(
    uninterrupted: Path, fork: Fork, tmp_path: Path
) -> None:
    rng, calm, folder = random.Random(5), tmp_path / "calm", tmp_path / "run"
    shutil.copytree(uninterrupted, calm)
    shutil.copytree(uninterrupted, folder)
    _, expected = ended(fork, calm, "--seconds", "0")
    for _ in range(10):
        before = len(list(folder.glob("nll/*.parquet")))
        child = fork(folder, "--trials", "60", "--final", "--seconds", "0.05")
        while child.poll() is None and len(list(folder.glob("nll/*.parquet"))) <= before:
            time.sleep(0.005)  # it gets somewhere, so no policy is killed three times
        time.sleep(rng.uniform(0, 0.1))
        child.kill()
        child.communicate(timeout=60)
    _, found = ended(fork, folder, "--seconds", "0")
    assert (rows(found), found["recommended"]) == (rows(expected), expected["recommended"])
    assert not found["dropped"] and not pending(folder)


def pending(folder: Path) -> list[tuple[str, str]]:
    """Evaluations that were begun and did not end."""
    lines = (folder / "attempts.jsonl").read_text().splitlines()
    last = {(d["part"], d["fingerprint"]): d["attempts"] for d in map(json.loads, lines)}
    return [key for key, count in last.items() if count]


def test_evaluators_share_the_windows_of_a_policy_and_a_kill_keeps_those_that_are_done(
    tmp_path: Path,
) -> None:
    folder, log, many = RunFolder(tmp_path / "run"), tmp_path / "log", 5

    def ask() -> dict[str, str]:
        executor = Processes(Toy(log, 0.01), 2)
        try:
            return measure(executor, folder, "report", [FULL, OTHER], SETTING, windows=many)
        finally:
            executor.close()

    folder.save_nll("report.3", KEY, Measurement(nll(OTHER, 1, 512, 3), 512))
    assert ask() == {}
    lines = [line.split() for line in log.read_text().splitlines()]
    asked = sorted(w[4] for w in lines if w[1] == "start" and w[3] == KEY)
    assert asked == ["512", "512from1", "512from2", "512from4"]  # all but what is there
    assert len({w[0] for w in lines}) == 2  # evaluators
    kept = folder.load_nll("report", KEY)
    assert (kept.nll == nll(OTHER, many, 512)).all() and kept.tokens == many * 512
    assert len(list(folder.path.glob("nll/*"))) == 2  # no pieces are left
    folder.close()


def test_pieces_that_a_kill_left_beside_the_whole_record_go(tmp_path: Path) -> None:
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    folder.save_nll("report", KEY, Measurement(nll(OTHER, 4, 512)))
    for first in (1, 2, 3, 4):  # the last one is beyond the record, and may be needed
        folder.save_nll(f"report.{first}", KEY, Measurement(nll(OTHER, 1, 512, first)))
    inline = Inline(Session(Toy(log, 0.0)))
    assert measure(inline, folder, "report", [OTHER], SETTING, windows=4, first=3) == {}
    assert not log.exists()
    assert folder.pieces("report") == [(4, KEY)]
    folder.close()


class Stops(Session):
    """Raises at its first job."""

    def __init__(self, log: Path, error: BaseException) -> None:
        super().__init__(Toy(log, 0.0))
        self.error = error

    def run(self, job: Job) -> Measurement:
        raise self.error


def test_ctrl_c_is_no_attempt_and_three_kills_are_final(tmp_path: Path) -> None:
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "log"
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            ask = Inline(Stops(log, KeyboardInterrupt()))
            measure(ask, folder, "report", [OTHER], SETTING, windows=2)
    assert folder.attempts.of("report", KEY) == 0
    for _ in range(3):
        folder.attempts.begin("report", KEY)
    inline = Inline(Session(Toy(log, 0.0)))
    why = {KEY: "killed 3 times while it was evaluated"}
    assert (
        measure(inline, folder, "report", [OTHER], SETTING, windows=2) == why and not log.exists()
    )
    assert measure(inline, folder, "select", [OTHER], SETTING, windows=2) == {}
    folder.close()


def test_the_full_cache_is_never_given_up_for_kills_of_the_driver(tmp_path: Path) -> None:
    folder, log = RunFolder(tmp_path / "run"), tmp_path / "log"

    class Killed(BaseException):
        """No handler of ours, as if by kill -9."""

    for _ in range(5):
        with pytest.raises(Killed):
            measure(Inline(Stops(log, Killed())), folder, "report", [FULL], SETTING, windows=2)
    assert (
        measure(Inline(Session(Toy(log, 0.0))), folder, "report", [FULL], SETTING, windows=2) == {}
    )
    with pytest.raises(RunError, match="the full cache cannot be evaluated"):
        measure(Inline(Stops(log, ValueError("no"))), folder, "select", [FULL], SETTING, windows=2)
    folder.close()
