"""Jobs in spawned processes, one per device. The driver never loads a model for them.

A process ends when its pipe closes, so a driver that is killed leaves no orphan that works on. A
process that is killed ends its job as `died`, and its slot opens anew with the next job.
"""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.search.work import Job, Outcome, Work, attempt

_SPAWN = multiprocessing.get_context("spawn")  # forked CUDA and OpenMP states do not work


@dataclass
class _Child:
    """A process, the driver's end of its pipe, and the job it has."""

    process: Any
    pipe: Connection
    key: int


class Processes:
    """`slots` processes that each open `work` once.

    Args:
        work: picklable; opened in every process.
        slots: how many.
    """

    def __init__(self, work: Work, slots: int) -> None:
        self.work, self.slots = work, slots
        self._children: dict[int, _Child] = {}
        self._busy: set[int] = set()

    def submit(self, slot: int, job: Job) -> None:
        """Send a job; the process starts with the slot's first one."""
        child = self._children.get(slot)
        if child is None or not child.process.is_alive():
            child = self._start(slot)
        child.key = job.key
        self._busy.add(slot)
        with contextlib.suppress(OSError):  # it died just now; `wait` will say so
            child.pipe.send(job)

    def wait(self) -> tuple[int, Outcome]:
        """Block until a process answers or dies."""
        while True:
            of: dict[Any, int] = {self._children[s].pipe: s for s in self._busy}
            of |= {self._children[s].process.sentinel: s for s in self._busy}
            for ready in wait(list(of)):
                slot = of[ready]
                child = self._children[slot]
                try:
                    outcome: Outcome = child.pipe.recv()
                except (EOFError, OSError):
                    child.process.join()
                    code = child.process.exitcode
                    why = (
                        f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
                    )
                    outcome = Outcome(child.key, "died", error=f"its evaluator died ({why})")
                    del self._children[slot]
                self._busy.discard(slot)
                return slot, outcome

    def close(self) -> None:
        """Kill all processes; nothing they do is worth waiting for."""
        for child in self._children.values():
            child.process.kill()
        for child in self._children.values():
            child.process.join()
            child.pipe.close()
        self._children.clear()
        self._busy.clear()

    def _start(self, slot: int) -> _Child:
        mine, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=_serve, args=(self.work, slot, theirs, os.getpid()), daemon=True
        )
        with _ignoring_interrupts():  # inherited: Ctrl-C is the driver's affair alone
            process.start()
        theirs.close()
        self._children[slot] = _Child(process, mine, -1)
        return self._children[slot]


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(work: Work, slot: int, pipe: Connection, driver: int) -> None:
    """A process: open the work, then answer jobs until the pipe closes."""
    threading.Thread(target=_watch, args=(driver,), daemon=True).start()
    session = None
    with contextlib.suppress(EOFError, OSError):
        while True:
            job: Job = pipe.recv()
            if session is None:
                try:
                    session = work.open(slot)
                except KvsearchError as e:
                    pipe.send(Outcome(job.key, "failed", error=str(e)))
                    continue
            pipe.send(attempt(session, job))


def _watch(driver: int) -> None:
    """End with the driver, even in the middle of a job."""
    while os.getppid() == driver:
        threading.Event().wait(0.5)
    os._exit(0)
