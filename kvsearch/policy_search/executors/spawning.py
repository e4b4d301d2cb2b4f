"""Processes that import the program's main script again: whether they can, and why one could not.

`multiprocessing` imports that script in every process that it spawns, before anything else runs
there, so that functions and classes of the script are known. What keeps a process from that is told
by what it wrote to stderr.
"""

import contextlib
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator
from typing import IO

from kvsearch.errors import RunError

GUARD = 'put what the script runs under `if __name__ == "__main__":`'
_ERROR = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b")
_AGAIN = "a process of a search imports the main script again, which would search itself"
_KEPT = 1 << 16  # bytes at the end of stderr that are looked at


def require_main(workers: int | None) -> None:
    """Raise a `RunError` where processes cannot import the main script, or are importing it.

    Args:
        workers: processes asked for; None if the search decides, which then asks for none.
    """
    if workers == 0:
        return
    me = multiprocessing.current_process()
    if getattr(me, "_inheriting", False):
        print(_AGAIN, file=sys.stderr)  # for the process that started this, whoever catches that:
        raise RunError(f"{_AGAIN}; {GUARD}")
    if workers is not None and me.daemon:
        raise RunError(
            "--workers is for the main process: a daemonic process, as of a multiprocessing pool, "
            "starts no others; leave out --workers"
        )
    if workers is not None and not can_spawn():
        raise RunError(
            f"the processes of --workers import the main script, and {_script()} is no file; save "
            "the script to one, or leave out --workers"
        )


def can_spawn() -> bool:
    """Whether this process may start others and the main script, if there is one, is a file."""
    if multiprocessing.current_process().daemon:
        return False
    main = sys.modules.get("__main__")
    named = getattr(getattr(main, "__spec__", None), "name", None)
    file = getattr(main, "__file__", None)
    return named is not None or file is None or os.path.exists(file)


@contextlib.contextmanager
def stderr_into(file: IO[bytes]) -> Iterator[None]:
    """Processes started inside write their stderr to `file`; on Windows, where this one does."""
    if os.name != "posix":
        yield
        return
    try:
        kept = os.dup(2)
    except OSError:  # closed, so nothing is lost
        yield
        return
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def written(file: IO[bytes], begin: int) -> str:
    """What is in a file from byte `begin` on, the last part of it; the file's position stays."""
    if not hasattr(os, "pread"):
        return ""
    size = os.fstat(file.fileno()).st_size
    begin = max(begin, size - _KEPT)
    return os.pread(file.fileno(), size - begin, begin).decode(errors="replace")


def last_line(stderr: str) -> str:
    """The line that says what went wrong: the last error of a traceback, or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [""])[-1]


def why_not_started(stderr: str, how: str) -> str:
    """Why a process ended before it was ready, and what to do.

    Args:
        stderr: what it wrote.
        how: it ended, such as `exit code 1`.
    """
    if _AGAIN in stderr or "bootstrapping phase" in stderr:
        return f"it imports {_script()} again, which starts processes of its own; {GUARD}"
    line = last_line(stderr)
    why = f"{line} ({how})" if line else f"{how}, without a message"
    if "spawn.py" in stderr or not line:
        return f"{why}; it imports {_script()} again, so {GUARD}, or leave out --workers"
    return why


def _script() -> str:
    return str(getattr(sys.modules.get("__main__"), "__file__", None) or "the main script")
