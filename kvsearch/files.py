"""Files that are either whole or absent, even if the process is killed while it writes them."""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

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
    raw = data.encode("utf-8") if isinstance(data, str) else data
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("xb") as f:
                f.write(raw)
                f.flush()
                os.fsync(f.fileno())
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as e:
        why = _ADVICE.get(e.errno or 0, e.strerror or str(e))
        raise RunError(f"cannot write {path}: {why}") from e
    return path


def require_writable(path: Path) -> None:
    """Make the parent folders of a file that is written later, and try to write there.

    Raises:
        RunError: the file could not be written, or is a folder.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.open("xb").close()
        draft.unlink()
    except OSError as e:
        why = _ADVICE.get(e.errno or 0, e.strerror or str(e))
        raise RunError(f"cannot write {path}: {why}") from e


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
    try:
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
    except OSError as e:
        why = _ADVICE.get(e.errno or 0, e.strerror or str(e))
        raise RunError(f"cannot write {path}: {why}") from e


def remove_drafts(folder: Path) -> None:
    """Remove half-written files of a killed process; no other process may be writing there."""
    with contextlib.suppress(OSError):
        for draft in folder.glob(".*.tmp"):
            if draft.is_file():
                draft.unlink()


@contextlib.contextmanager
def drafted(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all of it is written, and else is removed.

    What a killed process left of the same folder is removed first.

    Raises:
        RunError: another process writes the same folder, or one of that name has appeared.
        OSError: it cannot be written.
    """
    draft = folder.with_name(f".{folder.name}.part")
    draft.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{draft}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as e:
        raise RunError(f"another kvsearch writes {folder}; choose another folder") from e
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        yield draft
        sync_tree(draft)
        if os.path.lexists(folder):
            raise RunError(
                f"{folder} has appeared meanwhile; move it away and run the same command again"
            )
        os.replace(draft, folder)
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        lock.release()
        with contextlib.suppress(OSError):
            os.unlink(lock.lock_file)


def sync_tree(folder: Path) -> None:
    """Have everything in a folder on the disk when the call returns.

    Raises:
        OSError: the disk cannot take it.
    """
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as f:
                os.fsync(f.fileno())
        elif path.is_dir():
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
