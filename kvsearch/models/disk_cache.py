"""The disk cache in the user's cache folder: each entry is made once, whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import platformdirs
from filelock import FileLock

from kvsearch.errors import RunError
from kvsearch.files import write_atomic

T = TypeVar("T")


def cache_folder() -> Path:
    """The folder; it may not exist yet. On Linux `XDG_CACHE_HOME` moves it."""
    return platformdirs.user_cache_path("kvsearch", appauthor=False)


def keep(entry: str, make: Callable[[Path], None]) -> Path:
    """Return the folder of `entry`, calling `make(draft)` first where it does not exist.

    Processes that ask for the same entry wait for the one that makes it. `make` writes into a
    draft folder that gets its real name only afterwards, so a reader never sees half an entry.

    Raises:
        OSError: the cache folder cannot be written. What `make` raises passes through.
    """
    place = cache_folder() / entry
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(place.with_name(f"{entry}.lock")):
        if not place.exists():
            draft = place.with_name(f"{entry}.part")
            # Only the holder of the lock makes drafts; one that exists is a dead process's.
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                make(draft)
                os.replace(draft, place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return place


def forget(entry: str) -> None:
    """Remove an entry that turned out to be damaged; an absent one is fine."""
    place = cache_folder() / entry
    if place.exists():
        with FileLock(place.with_name(f"{entry}.lock")):
            shutil.rmtree(place, ignore_errors=True)


def remembered(
    kind: str, words: str, ids: bytes, read: Callable[[Any], T], make: Callable[[], Any]
) -> T:
    """Something that was measured once, as JSON.

    Args:
        kind: folder of the cache.
        words: everything that it depends on: model, settings.
        ids: of the text.
        read: from JSON data to the value; raises `ValueError` or `TypeError` on other data.
        make: measures, and returns JSON data.
    """
    key = sha256(words.encode() + ids).hexdigest()[:16]
    file = cache_folder() / kind / f"{key}.json"
    try:
        return read(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        pass  # not measured yet
    data = make()
    with contextlib.suppress(RunError):  # a cache that cannot be written only costs time
        write_atomic(file, json.dumps(data) + "\n")
    return read(data)
