"""Processes that cannot start: one sentence says why, at the first one if others would fail too."""

import multiprocessing
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import HERE
from toy import Session, Toy

import kvsearch
from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.executors.ray_actors import why_lost
from kvsearch.policy_search.worker import Job

SCRIPT = """
import os, sys
from pathlib import Path
TOP
import toy
from kvsearch.policy import Policy
from kvsearch.policy_search.executors.processes import Processes
from kvsearch.policy_search.worker import Job
Path(sys.argv[1]).open("a").write("imported\\n")
if GUARD:
    e = Processes(toy.Toy(Path(sys.argv[1] + ".log"), 0.0), 1)
    e.submit(0, Job(0, "search", Policy()))
    print(e.wait()[1].error)
    e.close()
"""
AGAIN = 'again, so put what the script runs under `if __name__ == "__main__":`, or leave out'
CASES = {
    "no guard": ("", "it imports .*mine.py again, which starts processes of its own; put what", 1),
    "import": ("import nothing", rf"No module named 'nothing' \(exit code 1\); .*{AGAIN}", 0),
    "exit": ("sys.exit(3)", rf"could not start: exit code 3, without a message; .*{AGAIN}", 0),
    "message": ("sys.exit('no GPU here')", r"could not start: no GPU here \(exit code 1\)", 0),
    "memory": (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); "
        "bytearray(1 << 40)",
        r"could not start: MemoryError \(exit code 1\)",
        0,
    ),
    "lines": ("raise ValueError('a\\nb')", r"could not start: ValueError: a \(exit code 1\)", 0),
    "killed": ("os.kill(os.getpid(), 9)", r"died 3 times .* \(killed by SIGKILL\); if memory", 0),
    "aborted": (
        "os.write(2, b'BLAS: no thread\\n'); os.abort()",
        r"died 3 times while it started \(killed by SIGABRT\): BLAS: no thread",
        0,
    ),
}  # fmt: skip


def run(script: str, *args: str, stdin: bool = False) -> tuple[str, str]:
    """stdout and stderr of a script that finds `toy`."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-" if stdin else script, *args], env=env, capture_output=True, text=True,
        input=Path(script).read_text() if stdin else None, timeout=300, check=False,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("case", CASES)
def test_a_process_that_cannot_start_says_why(case: str, tmp_path: Path) -> None:
    top, said, imported = CASES[case]
    guard = "True" if case == "no guard" else "__name__ == '__main__'"
    top = f"if __name__ != '__main__': {top}" if top else ""
    script, log = tmp_path / "mine.py", tmp_path / "imports"
    script.write_text(SCRIPT.replace("TOP", top).replace("GUARD", guard))
    out, err = run(str(script), str(log))
    assert re.fullmatch(rf"evaluator 0 .*{said}.*", out), out
    assert not err  # no tracebacks of processes
    assert log.read_text().count("imported") == 1 + imported  # it was not started again


def test_a_script_from_standard_input_is_named(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.replace("TOP", "").replace("GUARD", "True"))
    out, err = run(str(script), str(tmp_path / "imports"), stdin=True)
    assert "evaluator 0 could not start: FileNotFoundError" in out and "<stdin>" in out and not err
    script.write_text(
        "from kvsearch.policy_search.executors.spawning import require_main\n"
        "try: require_main(2)\n"
        "except ValueError as e: print(e)\n"
    )
    out, err = run(str(script), stdin=True)
    assert out.startswith("the processes of --workers import the main script, and")
    assert out.endswith("<stdin> is no file; save the script to one, or leave out --workers")


def test_a_search_that_is_imported_again_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the script does about the error, the driver hears of it."""
    script, log = tmp_path / "mine.py", tmp_path / "imports"
    top = (
        "from kvsearch.policy_search.executors.spawning import require_main\n"
        "try: require_main(2)\n"
        "except ValueError: sys.exit(0)"
    )
    script.write_text(SCRIPT.replace("TOP", top).replace("GUARD", "True"))
    out, err = run(str(script), str(log))
    assert re.match(r"evaluator 0 could not start: it imports .*mine.py again, which starts", out)
    assert not err and log.read_text().count("imported") == 1
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "_inheriting", True, raising=False)
    for workers in (2, None):
        with pytest.raises(RunError, match="put what the script runs under"):
            kvsearch.search("no model is loaded", workers=workers, out=tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setitem(process._config, "daemon", True)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="a daemonic process, as of a multiprocessing pool, starts"):
        kvsearch.search("no model is loaded", workers=2, out=tmp_path / "run")


def test_an_actor_that_fails_by_itself_is_not_started_again() -> None:
    """As Ray 2.60 words it where the work cannot be read on a node."""
    said = (
        "The actor died because of an error raised in its creation task, \x1b[36mray::_Evaluator"
        ".__init__()\x1b[39m (pid=11135)\n  At least one of the input arguments for this task "
        "could not be computed:\nray.exceptions.RaySystemError: System error: libghost.so\n"
        '  File "ghost.py", line 3\nImportError: libghost.so: cannot open shared object file'
    )
    assert why_lost(said) == ("ImportError: libghost.so: cannot open shared object file", False)
    killed = "The actor died unexpectedly before finishing this task.\n\tclass_name: _Evaluator"
    assert why_lost(killed) == ("The actor died unexpectedly before finishing this task.", True)


@dataclass(frozen=True)
class Warns(Toy):
    def open(self, slot: int) -> Session:
        print("a warning of a library", file=sys.stderr)
        return super().open(slot)


def test_what_an_evaluator_says_is_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = Processes(Warns(tmp_path / "log", 0.0), 1)
    executor.submit(0, Job(0, "search", Policy()))
    assert executor.wait()[1].status == "ok"
    executor.close()
    assert capfd.readouterr().err == "a warning of a library\n"
