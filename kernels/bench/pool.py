"""Units of work in processes of their own, each with a time limit.

A process serves units one after the other, and keeps what they load. One that fails CUDA, dies or
hangs ends, with all that it started, and the next unit gets a new one. Processes are forked from a
server that has imported torch and has not touched a GPU.
"""

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock, Thread
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PRELOADED = ("torch._dynamo", "jobs")  # which start no threads, and ask for no GPU
START = 120.0  # seconds in which a process has to start, imports included
Row = dict[str, Any]


@dataclass(frozen=True)
class Unit:
    """Something to do, and how long it may take.

    Attributes:
        name: unique in its stage.
        call: `module:function` of this folder; it is given `options`, and says rows by `emit`.
        options: JSON.
        limit: seconds.
        least: seconds that must be left for it to be begun.
    """

    name: str
    call: str
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: float = 60.0
    least: float = 1.0


@dataclass(frozen=True)
class Ended:
    """How a unit ended: `done`, `skipped`, `failed`, `stopped` at its limit, or `cut` at the end.

    Attributes:
        how: one of these words.
        reason: in a sentence.
        seconds: that it took.
    """

    how: str
    reason: str | None = None
    seconds: float = 0.0


class Skipped(Exception):
    """A unit is not for this machine; the message says why."""


def sentence(error: BaseException) -> str:
    """The first line of an error, with its type."""
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}"


_say: Callable[[Row], None] | None = None


def emit(**row: Any) -> None:
    """Hand a row to the parent, or print it where there is none."""
    (_say or print)(row)


class Worker:
    """A process that serves units.

    Args:
        log: file that its output is appended to.
        method: `forkserver`, or `spawn` where a fork cannot use the GPU.
        threads: of its CPU; None leaves torch's.
    """

    def __init__(self, log: Path, method: str, threads: int | None) -> None:
        context: Any = get_context(method)
        self._here, there = context.Pipe()
        self._alive, watched = context.Pipe()
        args = (there, watched, str(log), threads)
        self._process = context.Process(target=_serve, args=args)
        self._process.start()
        there.close()
        watched.close()

    def run(self, unit: Unit, limit: float, heard: Callable[[Row], None]) -> Ended:
        """Do a unit; `heard` gets its rows at once."""
        start = time.monotonic()

        def ended(how: str, reason: str | None) -> Ended:
            return Ended(how, reason, round(time.monotonic() - start, 2))

        try:
            self._here.send((unit.call, dict(unit.options), unit.name))
            while True:
                if not self._here.poll(max(0.0, start + limit - time.monotonic())):
                    self.kill()
                    return ended("stopped", f"it was stopped after {limit:.0f} s")
                kind, value = self._here.recv()
                if kind == "row":
                    heard(value)
                else:
                    if value is not None and "CUDA error" in value:
                        self.kill()  # nothing more runs in it
                    return ended(kind, value)
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.kill()
            word = f"signal {-code}" if code is not None and code < 0 else f"code {code}"
            return ended("failed", f"its process ended with {word}")

    @property
    def usable(self) -> bool:
        """Whether it can serve another unit."""
        return bool(self._process.is_alive()) and not self._here.closed

    def kill(self) -> None:
        """End it, with what it started."""
        with suppress(ProcessLookupError, PermissionError):
            if self._process.pid is not None:
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(Exception):
            self._process.kill()
            self._process.join(5)
        self._here.close()
        self._alive.close()


def _serve(conn: Connection, watched: Connection, log: str, threads: int | None) -> None:
    """Serve units until the parent has no more; ends with it, even in the middle of one."""
    global _say
    os.setpgid(0, 0)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(file, stream)
    lock = Lock()

    def say(row: Row) -> None:
        with lock:
            conn.send(("row", row))

    def watch() -> None:
        with suppress(Exception):
            watched.recv()
        os.killpg(0, signal.SIGKILL)

    _say = say
    Thread(target=watch, daemon=True).start()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
    while True:
        try:
            call, options, name = conn.recv()
        except (EOFError, OSError):
            os._exit(0)
        print(f"--- {name}", flush=True)
        ended: tuple[str, str | None] = "done", None
        try:
            module, _, function = call.partition(":")
            getattr(import_module(module), function)(**options)
        except Skipped as why:
            ended = "skipped", str(why)
        except BaseException as error:  # whatever a compiler, a launch or a command may raise
            traceback.print_exc()
            ended = "failed", sentence(error)
        sys.stdout.flush()
        sys.stderr.flush()
        with lock:
            conn.send(ended)


class Pool:
    """Processes for units, started when they are needed.

    Args:
        log: file that their output is appended to.
    """

    def __init__(self, log: Path) -> None:
        self.log, self.method, self._workers = log, "forkserver", list[Worker]()
        self._lock = Lock()
        ours = [str(HERE), str(ROOT), str(HERE.parent)]  # before what is installed
        sys.path[:] = [*ours, *(x for x in sys.path if x not in ours)]
        path = [*ours, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # an import asks without CUDA
        get_context("forkserver").set_forkserver_preload([*PRELOADED])

    def run(
        self, units: Sequence[Unit], heard: Callable[[Unit, Row | Ended], None], *,
        width: int = 1, end: float = float("inf"),
    ) -> None:  # fmt: skip
        """Do units in order, `width` at a time, until `end` of the monotonic clock.

        Args:
            units: in order of worth.
            heard: is given their rows at once, and how each ended that was begun.
            width: processes.
            end: those that have not been begun are left out, and those that run are cut.
        """
        todo, lock = iter(units), Lock()

        def serve() -> None:
            worker: Worker | None = None
            try:
                while (unit := _next(todo, lock, end)) is not None:
                    if worker is None or not worker.usable:
                        worker = self._started(1 if width > 1 else None)
                    left = end - time.monotonic()
                    limit = min(unit.limit, left)
                    found = worker.run(unit, limit, lambda row, u=unit: heard(u, row))
                    if found.how == "stopped" and limit == left:
                        found = Ended("cut", "time was up", found.seconds)
                    heard(unit, found)
            finally:
                if worker is not None:
                    worker.kill()

        threads = [Thread(target=serve) for _ in range(min(width, len(units)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _started(self, threads: int | None) -> Worker:
        worker = Worker(self.log, self.method, threads)
        with self._lock:
            self._workers.append(worker)
        return worker

    def kill(self) -> None:
        """End everything that runs."""
        with self._lock:
            for worker in self._workers:
                worker.kill()


def _next(todo: Iterator[Unit], lock: Lock, end: float) -> Unit | None:
    """The next unit for which there is time."""
    with lock:
        for unit in todo:
            if end - time.monotonic() >= unit.least:
                return unit
    return None


def output(command: Sequence[str], **how: Any) -> str:
    """What a command prints, or nothing where it cannot be run."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=20, **how
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""
