"""Parent watch: a process must not outlive the one that started it, even when that is killed.

No handler runs in a process that gets kill -9, so each child watches for the end of its parent.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


def die_with_parent() -> None:
    """End this spawned process as soon as its parent ends, in the middle of a job or not."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    # Everywhere: the pipe on which a spawned process watches its parent closes.
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    # On Linux also by the kernel, which needs no interpreter lock. It follows the thread that
    # started us, so evaluators are started from the driver's main thread.
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _follow(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Processes started inside never see Ctrl-C, not even while they come up.

    A terminal sends it to all processes; the driver decides whether evaluators stop.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # children inherit it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
