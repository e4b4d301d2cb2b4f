"""kill -9 while windows grow: further windows are events of the journal, and nothing changes."""

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import KILLS, Fork, ends
from test_kills import Killer
from toy import FROM, GROWN, SHAPE, Session, Toy, nll, searched, task

from kvsearch.policy import Policy
from kvsearch.policy_search import fidelity
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.worker import Job
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Trial

TRIALS = 60
TPE, KVEI = (task(TRIALS, sampler, windows=GROWN) for sampler in ("tpe", "kvei"))
FULL = Policy().fingerprint(SHAPE.layers)


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    """What the journal says of every trial, in its order."""
    found = RunFolder(folder, write=False).trials()
    return [(t.number, t.name, t.state, t.fingerprint, t.windows, t.dnll, t.tokens) for t in found]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted search with growing windows."""
    place = tmp_path_factory.mktemp("calm")
    searched(place / "run", Session(Toy(place / "log", 0.0)), TPE)
    return place / "run"


def test_windows_go_to_contenders_and_losses_are_those_of_the_windows(calm: Path) -> None:
    run = RunFolder(calm, write=False)
    trials = run.trials()
    assert {t.windows for t in trials if t.state == "complete"} > {1, 2}
    best = fidelity.contenders(trials, task(0).setting.budget_bytes)
    assert len({t.windows for t in best}) == 1 and best[0].windows == max(t.windows for t in trials)
    assert len(best) < sum(t.state == "complete" for t in trials) / 2
    full = nll(Policy(), GROWN, 512)
    for t in trials:
        if t.state == "complete":
            kept = run.load_nll("search", t.fingerprint).nll
            assert (kept == nll(t.policy, t.windows, 512)).all() and t.tokens == kept.size + len(
                kept
            )
            lost = (kept - full[: len(kept)])[:, FROM - 1 :]
            assert t.dnll == pytest.approx(float(lost.mean()), abs=1e-6)
    free = sum(t.kind == "searched" and t.state == "complete" for t in trials)
    more = sum(t.windows - 1 for t in trials if t.state == "complete")
    assert free == TRIALS and more >= TRIALS - 1  # in turn


class Lucky(Session):
    """Windows on which a policy is much better or worse than on others."""

    def run(self, job: Job) -> Measurement:
        found = super().run(job)
        if job.policy.slots is not None:
            key = int(job.policy.fingerprint(SHAPE.layers), 16) % 2**32
            for i, w in enumerate(range(job.first, job.first + (job.windows or 1))):
                found.nll[i] += np.random.default_rng([key, w]).normal(0, 0.5)
        return found


def test_who_was_once_a_contender_is_not_alone_in_having_the_most_windows(tmp_path: Path) -> None:
    """Only policies with the most windows are chosen: the contenders have to be among them."""
    for seed in range(8):
        what = task(10, "random", seed, windows=GROWN, warm_start=False)
        trials = searched(tmp_path / f"run{seed}", Lucky(Toy(tmp_path / "log", 0.0)), what)
        most = fidelity.most_measured([t for t in trials if t.state == "complete"])
        best = fidelity.contenders(trials, what.setting.budget_bytes)
        assert {t.name for t in best} <= {t.name for t in most}


@pytest.mark.slow
def test_the_driver_is_killed_and_ends_like_an_uninterrupted_one(
    calm: Path, fork: Fork, tmp_path: Path
) -> None:
    rng, folder, kills = random.Random(3), tmp_path / "run", 0
    journal = folder / "trials.jsonl"
    how = ["--windows", str(GROWN), "--trials", str(TRIALS), "--seconds", "0.01"]
    how += ["--workers", "1"]
    flying: Counter[str] = Counter()

    def lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    while True:
        child = fork(folder, *how)
        goal = lines() + rng.randint(3, 12)  # it gets somewhere: none is killed three times
        while child.poll() is None and kills < KILLS:
            if lines() >= goal:
                time.sleep(rng.uniform(0, 0.03))
                child.kill()
                kills += 1
                break
            time.sleep(0.002)
        _, err = child.communicate(timeout=240)
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, err
        run = RunFolder(folder, write=False)
        pending = (t.fingerprint for t in run.journal.read())
        flying += Counter({k for k in pending if run.attempts.of("search", k)})
        flying[FULL] += 1  # on further windows it is not counted
    assert kills >= min(KILLS, 10)
    assert outcomes(folder) == outcomes(calm)
    for (key, _), times in ends(tmp_path / "run.log").items():
        assert times <= 1 + flying[key]  # only what was in flight was evaluated again


@pytest.mark.slow
def test_the_evaluator_is_killed_and_the_run_ends_like_an_uninterrupted_one(
    calm: Path, tmp_path: Path
) -> None:
    log, folder = tmp_path / "log", tmp_path / "run"
    executor, run = Processes(Toy(log, 0.02), 1), RunFolder(folder)
    killer = Killer(log, folder, min(KILLS, 8))
    killer.start()
    try:
        Search(TPE, executor, run, lambda *_: None).run()
    finally:
        killer.over = True
        killer.join()
        executor.close()
        run.close()
    assert killer.done
    assert outcomes(folder) == outcomes(calm)


class Fails(Session):
    """Fails on later windows of one policy, the first that gets there."""

    chosen = ""

    def run(self, job: Job) -> Measurement:
        found = super().run(job)
        key = job.policy.fingerprint(SHAPE.layers)
        if job.first and key != FULL and self.chosen in ("", key):
            self.chosen = key
            found.nll[:] = np.nan
        return found


def test_a_policy_that_fails_on_further_windows_counts_no_longer(tmp_path: Path) -> None:
    session = Fails(Toy(tmp_path / "log", 0.0))
    trials = searched(tmp_path / "run", session, KVEI)
    (lost,) = [t for t in trials if t.state == "failed"]
    assert lost.fingerprint == session.chosen and lost.dnll is None
    assert lost.error is not None and lost.error.startswith("on further windows: ")
    assert outcomes(tmp_path / "run") == [
        (t.number, t.name, t.state, t.fingerprint, t.windows, t.dnll, t.tokens) for t in trials
    ]
    lines = (tmp_path / "log").read_text()
    searched(tmp_path / "run", session, KVEI)
    assert (tmp_path / "log").read_text() == lines  # nothing is tried again


def test_the_least_measured_contender_is_next() -> None:
    def trial(number: int, dnll: float, windows: int, bytes_peak: int) -> Trial:
        return Trial(
            number, str(number), "searched", "complete", Policy(), str(number), dnll=dnll,
            windows=windows, bytes_peak=bytes_peak,
        )  # fmt: skip

    best = [trial(i, 0.1 + 0.01 * i, 3 - i % 2, 100) for i in range(6)]
    small, worse = trial(6, 0.9, 2, 10), trial(7, 0.95, 1, 20)
    found = [*best, small, worse, trial(8, 0.01, 1, 101)]
    names = [t.number for t in fidelity.contenders(found, 100)]
    assert names == [0, 1, 2, 3, 6]  # the best four, and the smallest

    def least(most: int, **under_way: int) -> Trial | None:
        """Under way are further windows of some trials, so many of each."""
        windows = {t.number: t.windows + under_way.get(f"t{t.number}", 0) for t in found}
        return fidelity.least_measured(found, 100, most, windows)

    assert least(3) is best[1]
    assert least(3, t1=1) is best[3]
    assert least(3, t1=1, t3=1, t6=1) is None  # the others have all
    assert least(4, t1=2, t3=2, t6=2) is best[0]
    assert least(4, t1=1, t3=1, t6=1) is best[0]  # all have three: the best one
    assert [t.number for t in fidelity.most_measured(found)] == [0, 2, 4]
