"""Files that are either whole or absent, even if the process is killed while it writes them."""

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from kvsearch.errors import RunError

_FILE = "a part of the path is a file, not a folder; choose another folder with --out"
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the disk is read-only; choose another folder with --out",
    errno.EACCES: "permission denied; choose another folder with --out",
    errno.ENOTDIR: _FILE,
    errno.EEXIST: _FILE,  # of a folder that would be made there
}


def write_atomic(path: str | os.PathLike[str], data: str | bytes) -> Path:
    """Write a file so that a reader sees the old content or all of the new, never a part.

    Missing parent folders are made. The data are on the disk when the call returns, so a journal
    line that names the file may be written next.

    Args:
        path: the file.
        data: its whole content; text is stored as UTF-8, line ends as given.

    Returns:
        The path.

    Raises:
        RunError: the file cannot be written; an older file of that name is untouched.
    """
    path = Path(path)
    with _told(path), contextlib.ExitStack() as undo:
        os.replace(_draft(path, _raw(data), undo), path)
        undo.pop_all()
    _sync_folder(path.parent)
    return path


def require_writable(path: Path) -> None:
    """Try to write where a file is written later; no trace of that is left, folders neither.

    Raises:
        RunError: the file could not be written, or is a folder.
    """
    with _told(path), contextlib.ExitStack() as undo:
        _draft(path, b"", undo).unlink()


def append_line(path: Path, line: str, *, sync: bool = True) -> None:
    """Add one line to a file, whole or not at all.

    Args:
        path: the file.
        line: without its end.
        sync: be on disk when the call returns, with all lines before; otherwise the line survives
            a kill of this process, but perhaps not of the machine.

    Raises:
        RunError: no space or no permission; the file is as it was.
    """
    data = line.encode() + b"\n"
    with _told(path):
        # Not a Python file: its buffer would try to write the rest again when it is closed.
        binary = getattr(os, "O_BINARY", 0)  # Windows would write \r\n
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | binary, 0o666)
        try:
            size = os.fstat(handle).st_size
            try:
                while data:
                    data = data[os.write(handle, data) :]
                if sync:
                    os.fsync(handle)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, size)
                raise
        finally:
            os.close(handle)


def remove_drafts(folder: Path) -> None:
    """Remove half-written files of a killed process; no other process may be writing there."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(".*.tmp"):
            if draft.is_file():
                draft.unlink()


def _raw(data: str | bytes) -> bytes:
    return data.encode("utf-8") if isinstance(data, str) else data


def _draft(path: Path, raw: bytes, undo: contextlib.ExitStack) -> Path:
    """Write what becomes a file, in its folder; `undo` removes it and the folders made for it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    for place in reversed((path.parent, *path.parent.parents)):
        if not place.is_dir():
            undo.callback(_try, place.rmdir)
            place.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    undo.callback(_try, draft.unlink)  # before it is there: an interrupt may come in between
    with draft.open("xb") as f:
        f.write(raw)
        f.flush()
        os.fsync(f.fileno())
    return draft


def _try(remove: Callable[[], None]) -> None:
    """Remove something that may be gone, or a folder that others may have filled."""
    with contextlib.suppress(OSError):
        remove()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say in one sentence why a file cannot be written."""
    try:
        yield
    except OSError as e:
        why = _ADVICE.get(e.errno or 0, e.strerror or str(e))
        raise RunError(f"cannot write {path}: {why}") from e


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
