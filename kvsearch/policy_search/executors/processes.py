"""Jobs in spawned processes, one per device. The driver never loads a model for them.

A process ends with its driver, however that ends. A process that is killed ends its job as `died`,
and its slot opens anew with the next job. A process that is killed before the work is open does not
end the job: it is started again, and after a few times the run ends with a sentence. One that ends
by itself before that would do so again, as where the script that it imports fails: the run ends.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from kvsearch.policy_search.executors.parent_watch import die_with_parent, undisturbed
from kvsearch.policy_search.executors.spawning import (
    last_line,
    stderr_into,
    why_not_started,
    written,
)
from kvsearch.policy_search.worker import (
    Job,
    Outcome,
    Session,
    Unusable,
    Work,
    attempt,
    why_unopened,
)  # fmt: skip

_SPAWN = multiprocessing.get_context("spawn")  # forked CUDA and OpenMP states do not work
_OPENED = "opened"
STARTS = 3  # times in a row that a slot may die before it has opened its work

_REFUSED = 70  # exit code of a process whose device refuses all work


@dataclass
class _Child:
    """A process, the driver's end of its pipe, and what it writes to stderr from `begin` on."""

    process: Any
    pipe: Connection
    stderr: IO[bytes]
    begin: int
    opened: bool = False


class Processes:
    """`slots` processes that each open `work` once.

    Args:
        work: picklable; opened in every process.
        slots: how many.
    """

    def __init__(self, work: Work, slots: int) -> None:
        self.work, self.slots = work, slots
        self._children: dict[int, _Child] = {}
        self._jobs: dict[int, Job] = {}
        self._starts: dict[int, int] = {}

    def open(self) -> None:
        """Start the processes that never were; they load side by side."""
        for slot in range(self.slots):
            if slot not in self._starts:
                self._start(slot)

    def submit(self, slot: int, job: Job) -> None:
        """Send a job; a process that has died starts again."""
        self._jobs[slot] = job
        child = self._children.get(slot)
        if child is None or not child.process.is_alive():
            self._remove(slot)
            child = self._start(slot)
        self._send(child, job)

    def wait(self) -> tuple[int, Outcome]:
        """Block until a process answers or dies."""
        while True:
            busy = {slot: self._children[slot] for slot in self._jobs}
            of: dict[Any, int] = {c.pipe: slot for slot, c in busy.items()}
            of |= {c.process.sentinel: slot for slot, c in busy.items()}
            for slot in {of[ready] for ready in wait(list(of))}:
                outcome = self._hear(slot)
                if outcome is not None:
                    return slot, replace(outcome, key=self._jobs.pop(slot).key)

    def close(self) -> None:
        """Kill all processes; their results are not needed."""
        for child in self._children.values():  # all first, so that they end side by side
            child.process.kill()
        for slot in list(self._children):
            self._remove(slot)
        self._jobs.clear()

    def _hear(self, slot: int) -> Outcome | None:
        """The outcome that a process sent, or that it died; None if more will follow."""
        child = self._children[slot]
        try:
            said = child.pipe.recv() if child.pipe.poll() else None
        except (EOFError, OSError):
            said = None
        if said == _OPENED:
            child.opened, self._starts[slot] = True, 0
            return None
        if isinstance(said, Outcome):
            return said
        child.process.join(5)  # it is ending; killed below if it cannot
        code, stderr = child.process.exitcode, written(child.stderr, child.begin)
        how = _exit(code)
        self._remove(slot, tell=child.opened)
        if child.opened:
            return Outcome(-1, "died", error=f"its evaluator died ({how})")
        if code is not None and code >= 0 and code != _REFUSED:
            why = f"evaluator {slot} could not start: {why_not_started(stderr, how)}"
            return Outcome(-1, "unopened", error=why)
        if self._starts[slot] < STARTS:
            self._send(self._start(slot), self._jobs[slot])
            return None
        why = f"evaluator {slot} died {STARTS} times while it started ({how})"
        if line := last_line(stderr):
            why += f": {line}"
        elif code == -signal.SIGKILL:
            why += "; if memory is short, take fewer --workers"
        return Outcome(-1, "unopened", error=why)

    def _start(self, slot: int) -> _Child:
        self._starts[slot] = self._starts.get(slot, 0) + 1
        resource_tracker.ensure_running()  # its start would let Ctrl-C through again
        mine, theirs = _SPAWN.Pipe()
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        with undisturbed(), stderr_into(stderr):
            process = _SPAWN.Process(target=_serve, args=(slot, theirs), daemon=True)
            process.start()
            begin = os.fstat(stderr.fileno()).st_size  # before it: of other threads of this one
        theirs.close()
        child = self._children[slot] = _Child(process, mine, stderr, begin)
        self._send(child, self.work)
        return child

    def _send(self, child: _Child, thing: object) -> None:
        try:
            child.pipe.send(thing)
        except OSError:  # it has just died; `wait` notices
            return

    def _remove(self, slot: int, *, tell: bool = True) -> None:
        """End a process; pass on what it wrote to stderr, unless a sentence says what counts."""
        child = self._children.pop(slot, None)
        if child is not None:
            child.process.kill()
            child.process.join()
            child.pipe.close()
            if tell and (text := written(child.stderr, child.begin)):
                sys.stderr.write(text)
            child.stderr.close()


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "the GPU refuses all work" if code == _REFUSED else f"exit code {code}"


def _serve(slot: int, pipe: Connection) -> None:
    """A process: open the work, then answer jobs until it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    die_with_parent()
    try:
        try:
            work: Work = pipe.recv()
            session = work.open(slot)
        except Exception as e:  # if the driver is gone, it cannot be told either
            pipe.send(Outcome(-1, "unopened", error=why_unopened(e)))
            return
        pipe.send(_OPENED)
        while True:
            pipe.send(_answer(session, pipe))
    except Unusable:
        os._exit(_REFUSED)  # at once: what ends a process in order would ask the device, too
    except (EOFError, OSError):  # the driver is gone
        return


def _answer(session: Session, pipe: Connection) -> Outcome:
    """The outcome of the next job; also of one that this process cannot read."""
    try:
        job = pipe.recv()
    except (EOFError, OSError):
        raise
    except Exception as e:  # such as a rule that only the driver's session has
        return Outcome(-1, "failed", error=f"an evaluator cannot read the policy ({e})")
    return attempt(session, job)
