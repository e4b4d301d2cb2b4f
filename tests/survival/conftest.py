"""Tools for tests that kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # spawned evaluators inherit it and find `toy`

# What Ray chooses for a cluster that it starts itself; clients of other clusters set it.
os.environ.setdefault("RAY_AUTH_MODE", "token")

KILLS = int(os.environ.get("KVSEARCH_KILLS", "10"))
RAY_KILLS = int(os.environ.get("KVSEARCH_RAY_KILLS", "6"))


def script(name: str, *options: str, **how: Any) -> "subprocess.Popen[str]":
    """A file of this folder as a process of its own; what it starts finds `toy` too."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    command = [sys.executable, str(HERE / name), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, **how)


def start(
    folder: Path, *options: str, before: Callable[[], None] | None = None
) -> "subprocess.Popen[str]":
    """The toy search as a process of its own; `before` runs in it first."""
    return script("toy.py", str(folder), *options, stderr=subprocess.PIPE, preexec_fn=before)


class Driver:
    """The toy search as a process that the nursery forked; used like a `Popen`."""

    def __init__(self, ask: Callable[..., Any], folder: Path, options: tuple[str, ...]) -> None:
        self.ask, self.returncode = ask, None
        self.err = folder.with_suffix(".err")
        self.pid = ask("start", os.devnull, str(self.err), [str(folder), *options])

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.ask("poll", self.pid)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:  # until it is polled, no other process has its number
            os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < deadline, "the driver does not end"
            time.sleep(0.005)
        return "", self.err.read_text()


Fork = Callable[..., Driver]


@pytest.fixture(scope="session")
def fork() -> Iterator[Fork]:
    """Like `start`, in milliseconds."""
    nursery = script("nursery.py", stdin=subprocess.PIPE)

    def ask(*what: Any) -> Any:
        assert nursery.stdin is not None and nursery.stdout is not None
        print(json.dumps(what), file=nursery.stdin, flush=True)
        return json.loads(nursery.stdout.readline())

    yield lambda folder, *options: Driver(ask, folder, options)
    nursery.communicate(timeout=60)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of a Ray cluster that drivers, and their deaths, come and go in."""
    pytest.importorskip("ray")
    cluster = script("cluster.py", stdin=subprocess.PIPE)
    assert cluster.stdout is not None
    found = cluster.stdout.readline().strip()
    assert found, "no cluster"
    yield found
    cluster.communicate(timeout=60)


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    """What the journal says of every trial, in order of number."""
    from kvsearch.results.journal import Journal

    found = Journal(folder / "trials.jsonl").read()
    return sorted((t.number, t.name, t.state, t.fingerprint, t.nll) for t in found)


def calm(place: Path, trials: int) -> list[tuple[Any, ...]]:
    """`outcomes` of an uninterrupted search with one evaluator and the same seed."""
    from toy import WINDOWS, Session, Toy, searched, task

    what = task(trials, together=WINDOWS)
    searched(place / "calm", Session(Toy(place / "calm.log", 0.0)), what)
    return outcomes(place / "calm")


def ends(log: Path) -> Counter[tuple[str, str]]:
    """How often each fingerprint was evaluated to its end, by how many tokens that was."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return Counter((w[3], w[4]) for w in lines if len(w) == 5 and w[1] == "end")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted toy search of 60 trials."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    child = start(folder, "--trials", "60", "--seconds", "0")
    _, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    return folder
