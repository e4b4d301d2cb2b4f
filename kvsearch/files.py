"""Files that are either whole or absent, even if the process is killed while it writes them."""

import contextlib
import csv
import errno
import glob
import io
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsearch.errors import RunError, named, reason

_FILE = "a part of the path is a file, not a folder; choose another folder with --out"
_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EROFS: "the disk is read-only; choose another folder with --out",
    errno.EACCES: "permission denied; choose another folder with --out",
    errno.ENOTDIR: _FILE,
    errno.EEXIST: _FILE,  # of a folder that would be made there
}
_DIGITS = 8  # of the random part of a draft's name


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
    sync_folder(path.parent)
    return path


def write_parquet(path: Path, table: Any, **how: Any) -> Path:
    """Write a table as `write_atomic` does; `how` is for `pyarrow.parquet.write_table`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", **how)
    return write_atomic(path, sink.getvalue().to_pybytes())


def csv_text(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Records as a table with these columns."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def write_all(
    folder: Path, files: Mapping[str, str | bytes], *, force: bool = False
) -> tuple[Path, ...]:
    """Write files that belong together, all of them or none.

    Nothing gets its name before all is on the disk. A call that fails or is interrupted removes
    what it made; after a kill the same call goes through, and removes the drafts that were left.

    Args:
        folder: where to; made if absent.
        files: name -> content; a name may have folders in it.
        force: overwrite files of other content. Of those, a call that stops while it gives files
            their names has replaced the first.

    Returns:
        The paths.

    Raises:
        RunError: a file is there with other content, or cannot be written.
    """
    if not force:
        require_free(folder, files)
    paths = tuple(folder / name for name in files)
    for path in paths:
        remove_drafts(path.parent, path.name)
    with contextlib.ExitStack() as undo:
        drafts = []
        for path, data in zip(paths, files.values(), strict=True):
            with _told(path):
                drafts.append(_draft(path, _raw(data), undo))
        for path, draft in zip(paths, drafts, strict=True):
            with _told(path):
                if not path.exists():
                    undo.callback(_try, path.unlink)
                os.replace(draft, path)
        undo.pop_all()
    for place in {path.parent for path in paths}:
        sync_folder(place)
    return paths


def require_free(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Refuse to overwrite files, except with what they hold already.

    Args:
        folder: where they are written later.
        files: name -> content.

    Raises:
        RunError: one is there with other content.
    """
    for name, data in files.items():
        path = folder / name
        with _told(path):
            if path.exists() and not _holds(path, _raw(data)):
                raise RunError(
                    f"{path} exists; give --force to overwrite it, or another folder with -o"
                )


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


def remove_drafts(folder: Path, name: str | None = None) -> None:
    """Remove half-written files of a killed process; no other process may be writing there.

    Args:
        folder: where they are.
        name: of the file that they were to become; None is any.
    """
    of = "*" if name is None else f"{glob.escape(name)}.{'?' * _DIGITS}"
    with contextlib.suppress(OSError):
        for draft in folder.glob(f".{of}.tmp"):
            if draft.is_file():
                draft.unlink()


def _raw(data: str | bytes) -> bytes:
    return data.encode("utf-8") if isinstance(data, str) else data


def _holds(path: Path, raw: bytes) -> bool:
    try:
        return path.read_bytes() == raw
    except OSError:
        return False


def _draft(path: Path, raw: bytes, undo: contextlib.ExitStack) -> Path:
    """Write what becomes a file, in its folder; `undo` removes it and the folders made for it."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    for place in reversed((path.parent, *path.parent.parents)):
        if not place.is_dir():
            undo.callback(_try, place.rmdir)
            place.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(_DIGITS // 2)}.tmp")
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
    if "\0" in str(path):
        raise RunError(f"cannot write {named(path)}: no name has a zero byte")
    try:
        yield
    except OSError as e:
        why = _ADVICE.get(e.errno or 0, reason(e))
        raise RunError(f"cannot write {named(path)}: {why}") from e


def sync_folder(folder: Path) -> None:
    """Make the new name itself durable, where the system lets a folder be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def finite(value: Any) -> Any:
    """Data for JSON, which has no word for a number that is not finite: null."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
