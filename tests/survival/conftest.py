"""Tools for tests that kill."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # spawned evaluators inherit it and find `toy`

KILLS = int(os.environ.get("KVSEARCH_KILLS", "50"))
RAY_KILLS = int(os.environ.get("KVSEARCH_RAY_KILLS", "20"))


def start(
    folder: Path, *options: str, before: Callable[[], None] | None = None
) -> "subprocess.Popen[str]":
    """The toy search as a process of its own; `before` runs in it first."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return subprocess.Popen(
        [sys.executable, str(HERE / "toy.py"), str(folder), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=before,
    )  # fmt: skip


def outcomes(folder: Path) -> list[tuple[Any, ...]]:
    """What the journal says of every trial, in order of number."""
    from kvsearch.search.journal import Journal

    found = Journal(folder / "trials.jsonl").read()
    return sorted((t.number, t.name, t.state, t.fingerprint, t.nll) for t in found)


def ends(log: Path) -> Counter[tuple[str, str]]:
    """How often each (fingerprint, stop) was evaluated to its end."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return Counter((w[3], w[4]) for w in lines if len(w) == 5 and w[1] == "end")


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy search of 60 trials that nobody disturbed."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    child = start(folder, "--trials", "60", "--seconds", "0")
    _, err = child.communicate(timeout=240)
    assert child.returncode == 0, err
    return folder
