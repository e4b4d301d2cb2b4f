"""Measurements of a model on a text, made once: the answer is kept in the user's cache folder."""

import contextlib
import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.files import write_atomic
from kvsearch.models.disk_cache import cache_folder


def kept_or_made(
    kind: str, words: str, windows: NDArray[np.int64], length: int, make: Callable[[], Any]
) -> Any:
    """The list that was made for the same words and windows before, or `make()`.

    Args:
        kind: folder of the answers.
        words: everything that the answer depends on besides the text, the model's digest included.
        windows: token windows `[W, T]`.
        length: of the list; a file with another one is not believed.
        make: measures; what it returns is as JSON reads it back.
    """
    key = sha256(words.encode() + np.ascontiguousarray(windows).tobytes()).hexdigest()[:16]
    file = cache_folder() / kind / f"{key}.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if len(found) == length:
            return found
    except (OSError, ValueError, TypeError):
        pass  # not measured yet
    made = make()
    with contextlib.suppress(RunError):  # a cache that cannot be written only costs time
        write_atomic(file, json.dumps(made) + "\n")
    return made
