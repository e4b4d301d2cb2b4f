"""Folders that are either whole or absent, even if the process is killed while it fills them."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from kvsearch.errors import RunError
from kvsearch.files import sync_folder
from kvsearch.frozen import has_half


def require_new(folder: Path) -> None:
    """Raise a `RunError` where there is something already, or no model can be written."""
    if has_half(str(folder)):
        raise RunError(
            f"{folder} is no name in UTF-8, and files of weights need one; choose another folder "
            "with --out"
        )
    if os.path.lexists(folder):
        raise RunError(f"{folder} exists already; choose another folder with --out")


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
        sync_folder(folder.parent)
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
            sync_folder(path)
    sync_folder(folder)
