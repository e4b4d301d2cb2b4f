"""Causes of failures: what stops a run, what counts against a policy, and what does not."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import start
from toy import WINDOWS, Session, Toy, searched, task

from kvsearch.errors import KvsearchError, RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors import cluster
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.worker import Job, Unusable
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Trial


def quiet(trial: Trial, trials: list[Trial]) -> None:
    """No output."""


class Stops(Session):
    """Raises in the driver's own process at the n-th job."""

    def __init__(self, toy: Toy, error: BaseException, jobs: int) -> None:
        super().__init__(toy)
        self.error, self.jobs = error, jobs

    def run(self, job: Job) -> Measurement:
        self.jobs -= 1
        if self.jobs == 0:
            raise self.error
        return super().run(job)


def attempts(folder: RunFolder, trial: Trial) -> int:
    return RunFolder(folder.path, write=False).attempts.of("search", trial.fingerprint)


def test_ctrl_c_is_no_attempt_however_often_it_comes(tmp_path: Path) -> None:
    toy = Toy(tmp_path / "log", 0.0)
    for _ in range(5):
        folder = RunFolder(tmp_path / "run")
        jobs = 6 if not folder.trials() else 1
        session = Stops(toy, KeyboardInterrupt(), jobs)
        with pytest.raises(KeyboardInterrupt):
            Search(task(3, together=WINDOWS), Inline(session), folder, quiet).run()
        assert [attempts(folder, t) for t in folder.running()] == [0]
        folder.close()
    trials = searched(tmp_path / "run", Session(toy), task(3, together=WINDOWS))
    assert all(t.state != "failed" and t.attempt == 1 for t in trials)


def test_a_trial_whose_nll_was_saved_is_complete_even_after_three_kills(tmp_path: Path) -> None:
    toy, folder = Toy(tmp_path / "log", 0.0), RunFolder(tmp_path / "run")
    trials = Search(task(3, together=WINDOWS), Inline(Session(toy)), folder, quiet).run()
    last = next(t for t in reversed(trials) if t.state == "complete")
    folder.append(replace(last, state="running", nll=None, dnll=None, tokens=0, attempt=3))
    lines = toy.log.read_text()
    again = Search(task(3, together=WINDOWS), Inline(Session(toy)), folder, quiet).run()
    folder.close()
    found = next(t for t in again if t.number == last.number)
    assert (found.state, found.nll, found.tokens) == ("complete", last.nll, last.tokens)
    assert toy.log.read_text() == lines  # and nothing was evaluated


def test_a_line_removed_by_hand_keeps_its_number(tmp_path: Path) -> None:
    toy, folder = Toy(tmp_path / "log", 0.0), RunFolder(tmp_path / "run")
    trials = Search(task(4), Inline(Session(toy)), folder, quiet).run()
    gone = next(t.number for t in trials if t.kind == "searched")
    assert gone < max(t.number for t in trials)
    kept = [t for t in trials if t.number != gone]
    (folder.path / "trials.jsonl").unlink()
    for t in kept:
        folder.append(t)
    more = Search(task(8), Inline(Session(toy)), folder, quiet).run()
    folder.close()
    assert [(t.number, t.nll) for t in more[: len(kept)]] == [(t.number, t.nll) for t in kept]
    assert len({t.number for t in more}) == len(more) and gone not in {t.number for t in more}


def test_a_policy_that_failed_is_not_tried_again(tmp_path: Path) -> None:
    toy, folder = Toy(tmp_path / "log", 0.0), RunFolder(tmp_path / "run")
    trials = Search(task(60, sampler="random"), Inline(Session(toy)), folder, quiet).run()
    done = next(t for t in trials if t.kind == "searched" and t.state == "complete")
    folder.append(replace(done, state="failed", nll=None, dnll=None, error="killed"))
    search = Search(task(60, sampler="random"), Inline(Session(toy)), folder, quiet)
    asked, knobs = search.study.ask(done.params)
    assert search.admit(asked, "again", "searched", knobs) is None
    folder.close()
    assert search.trials[-1].state == "rejected"
    assert search.trials[-1].error == f"same policy as {done.name}, which failed"
    assert search.study.trials[-1].constraints["fits"] > 0


def test_drafts_of_a_killed_run_are_swept(tmp_path: Path) -> None:
    RunFolder(tmp_path / "run").close()
    draft = tmp_path / "run" / "nll" / ".search-0123.parquet.ab12.tmp"
    draft.write_bytes(b"half")
    RunFolder(tmp_path / "run").close()
    assert not draft.exists()


@dataclass(frozen=True)
class Unopened(Toy):
    """Work that cannot be opened on the second slot: a sentence, an exception, or a kill."""

    how: str = ""

    def open(self, slot: int) -> Session:
        if slot == 0:
            return super().open(slot)
        if self.how == "sentence":
            raise KvsearchError("the model needs 2 GiB and the device has 1")
        if self.how == "exception":
            raise ZeroDivisionError("as planned")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sentence", "^the model needs 2 GiB and the device has 1$"),
        ("exception", r"could not start \(ZeroDivisionError: as planned\)"),
        ("kill", "evaluator 1 died 3 times while it started .killed by SIGKILL."),
    ],
)
def test_an_evaluator_that_cannot_open_stops_the_run_and_blames_no_policy(
    how: str, said: str, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    executor = Processes(Unopened(tmp_path / "log", 0.2, "", how), 2)
    with pytest.raises(RunError, match=said):
        Search(task(4), executor, folder, quiet).run()
    executor.close()
    assert not [t for t in folder.trials() if t.state == "failed"]
    assert all(attempts(folder, t) == 0 for t in folder.running())
    folder.close()


@dataclass(frozen=True)
class Poisoned(Toy):
    """Work on a device that refuses everything after a policy whose heads vote together."""

    def open(self, slot: int) -> Session:
        return Sticky(self)


class Sticky(Session):
    dead = False

    def run(self, job: Job) -> Measurement:
        assert not self.dead, "another policy would be blamed"
        if culprit(job.policy):
            self.dead = True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().run(job)

    def forget(self) -> None:
        if self.dead:
            raise Unusable("CUDA error: an illegal memory access was encountered")


def culprit(policy: Policy) -> bool:
    return policy.rule is not None and policy.rule.share == "layer"


def test_a_device_that_refuses_all_work_is_the_fault_of_one_policy_alone(tmp_path: Path) -> None:
    folder, executor = RunFolder(tmp_path / "run"), Processes(Poisoned(tmp_path / "log", 0.0), 1)
    trials = Search(task(2), executor, folder, quiet).run()
    executor.close()
    folder.close()
    failed = [t for t in trials if t.state == "failed"]
    assert failed and sum(t.state == "complete" for t in trials) > 5
    for t in failed:
        assert culprit(t.policy) and t.attempt == 3
        assert t.error == "its evaluator died (the GPU refuses all work)"


def test_in_the_drivers_own_process_it_ends_the_run_which_goes_on_when_asked(
    tmp_path: Path,
) -> None:
    said = []
    for _ in range(60):
        folder = RunFolder(tmp_path / "run")
        search = Search(task(2), Inline(Sticky(Toy(tmp_path / "log", 0.0))), folder, quiet)
        try:
            trials = search.run()
            break
        except RunError as error:
            said.append(str(error))
        finally:
            folder.close()
    failed = [t for t in trials if t.state == "failed"]
    assert failed and all(culprit(t.policy) for t in failed)
    assert len(said) == 3 * len(failed)
    assert said[0].startswith(f"the GPU refuses all work after policy {failed[0].name} (CUDA error")
    assert said[0].endswith("; run the same command again to go on")


def test_an_evaluator_killed_while_idle_is_replaced_in_silence(tmp_path: Path) -> None:
    executor = Processes(Toy(tmp_path / "log", 0.0), 1)
    for key in range(3):
        executor.submit(0, Job(key, "search", Policy()))
        slot, outcome = executor.wait()
        assert (slot, outcome.key, outcome.status) == (0, key, "ok")
        process = executor._children[0].process
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    executor.close()
    assert len({line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}) == 3


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; from pathlib import Path\n"
        "from kvsearch.cli import _interrupt; import toy\n"
        "from kvsearch.policy import Policy; from kvsearch.policy_search.worker import Job\n"
        "from kvsearch.policy_search.executors.processes import Processes\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, _interrupt)\n"
        "    e = Processes(toy.Toy(Path(sys.argv[1]), 60.0), 2)\n"
        "    for i in range(2): e.submit(i, Job(i, 'search', Policy()))\n"
        "    try: e.wait()\n"
        "    except KeyboardInterrupt: print('first', flush=True); time.sleep(60)\n"
    )
    script, log = tmp_path / "wait.py", tmp_path / "log"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, str(script), str(log)], env=env, start_new_session=True,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not log.exists() or log.read_text().count("start") < 2:
        assert child.poll() is None
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)
    assert child.stdout is not None and child.stdout.readline() == "first\n"
    begun = time.monotonic()
    os.killpg(child.pid, signal.SIGINT)
    assert child.wait(timeout=30) == 130 and time.monotonic() - begun < 10
    child.stdout.close()
    pids = {line.split()[0] for line in log.read_text().splitlines()}
    for _ in range(100):
        if not any(Path(f"/proc/{p}").exists() for p in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"orphans: {pids}")


@pytest.mark.slow
def test_a_killed_driver_of_ray_leaves_no_process_and_its_folder_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    room = Path(tempfile.mkdtemp(prefix="kv"))  # of its own; short: sockets are put inside
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setattr("tempfile.tempdir", str(room))
    folder, options = tmp_path / "run", ["--ray", "local", "--workers", "2", "--trials", "5"]
    child = start(folder, *options, "--seconds", "0.3")
    log = tmp_path / "run.log"
    while not log.exists() or log.read_text().count("end") < 4:
        assert child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.communicate(timeout=60)
    pids = {line.split()[0] for line in log.read_text().splitlines()}
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{p}").exists() for p in pids):
        assert time.monotonic() < deadline, "actors outlive their driver"
        time.sleep(0.1)
    run = RunFolder(folder)  # at once
    known = run.trials()
    search = Search(task(5), Inline(Session(Toy(log, 0.0))), run, quiet)
    names = [t.name for t in search.run()]
    assert names[: len(known)] == [t.name for t in known]
    run.close()
    (left,) = room.glob("kvray-*")
    os.utime(left, (1, 1))  # long ago, so that it cannot be one that is just starting
    cluster._remove_stale_folders()
    assert not left.exists()
    shutil.rmtree(room)


def test_what_ray_prints_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cluster, "require_ray", lambda: None)
    init, end = (lambda address, **how: print("(raylet)")), (lambda: print("A worker died"))
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=end)
    monkeypatch.setitem(sys.modules, "ray", ray)
    found = cluster.Cluster("somewhere", 1)
    print("A worker died")  # a thread of Ray, while actors work
    ray.is_initialized = lambda: True
    found.close()
    print("result")
    assert capsys.readouterr().out == "result\n"


def test_only_folders_of_dead_drivers_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("kvray-dead", "kvray-alive", "kvray-young", "kvray-unlocked", "other"):
        (tmp_path / name).mkdir()
        if name != "kvray-unlocked":
            (tmp_path / name / ".lock").touch()
        os.utime(tmp_path / name, None if name == "kvray-young" else (1, 1))
    (tmp_path / "kvray-link").symlink_to(tmp_path / "other")
    code = (
        "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1])\n"
        "lock.acquire(); print(flush=True); time.sleep(60)"
    )
    lock = str(tmp_path / "kvray-alive" / ".lock")
    holder = subprocess.Popen([sys.executable, "-c", code, lock], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline()
    cluster._remove_stale_folders()
    kept = {"kvray-alive", "kvray-young", "kvray-unlocked", "kvray-link", "other"}
    assert {f.name for f in tmp_path.iterdir()} == kept
    os.utime(tmp_path / "kvray-alive", (1, 1))
    holder.kill()
    holder.communicate()
    cluster._remove_stale_folders()
    assert {f.name for f in tmp_path.iterdir()} == kept - {"kvray-alive"}
