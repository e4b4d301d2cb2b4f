"""What a GGUF file says before its tensors: keys and values, and where each tensor is.

gguf's own reader takes seconds for a vocabulary; this one passes over arrays.
"""

import math
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import ModelError

_FORMATS = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")  # of a value's types
_TEXT, _ARRAY, _FP32 = 8, 9, 0


@dataclass(frozen=True)
class Header:
    """A file's keys and tensors.

    Attributes:
        path: of the file.
        fields: value of every key; None of arrays.
        tensors: shape (fastest first), ggml type and place in the file of every tensor.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]

    @property
    def architecture(self) -> str:
        """As llama.cpp calls it."""
        return str(self.fields.get("general.architecture", ""))

    @property
    def own(self) -> dict[str, Any]:
        """What the model computes by: its architecture's keys, without that name in front."""
        front = f"{self.architecture}."
        return {k.removeprefix(front): v for k, v in self.fields.items() if k.startswith(front)}

    @property
    def numbers(self) -> int:
        """Of all tensors."""
        return sum(math.prod(shape) for shape, _, _ in self.tensors.values())

    def vector(self, name: str) -> NDArray[np.float32] | None:
        """A tensor of one dimension, or None if there is none of that name.

        Raises:
            ModelError: it is not fp32, or not whole.
        """
        if name not in self.tensors:
            return None
        shape, kind, place = self.tensors[name]
        if kind == _FP32:
            found = np.fromfile(self.path, np.dtype("<f4"), math.prod(shape), offset=place)
            if found.size == math.prod(shape):
                return found.astype(np.float32)
        raise ModelError(f"{self.path} has {name} that cannot be read; fetch it again")


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with path.open("rb") as f:
            return _read(path, f)
    except (EOFError, IndexError, OverflowError, ValueError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} is damaged or not whole; fetch it again") from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _read(path: Path, f: BufferedReader) -> Header:
    def value(kind: str) -> Any:
        size = struct.calcsize(f"<{kind}")
        return struct.unpack(f"<{kind}", f.read(size))[0]

    def text() -> str:
        length = value("Q")
        raw = f.read(length) if length < 1 << 24 else b""
        if len(raw) < length:
            raise EOFError
        return raw.decode("utf-8", "replace")

    def skip(kind: int, count: int) -> None:
        if kind not in (_TEXT, _ARRAY):
            f.seek(count * struct.calcsize(f"<{_FORMATS[kind]}"), 1)
            return
        for _ in range(count):
            if kind == _TEXT:
                f.seek(value("Q"), 1)
            else:
                skip(value("I"), value("Q"))

    def field() -> Any:
        kind = value("I")
        if kind == _ARRAY:
            return skip(value("I"), value("Q"))
        return text() if kind == _TEXT else value(_FORMATS[kind])

    f.seek(8)  # magic and version
    tensors, fields = value("Q"), value("Q")
    found = {text(): field() for _ in range(fields)}
    places = {}
    for _ in range(tensors):
        name = text()
        shape = tuple(value("Q") for _ in range(value("I")))
        places[name] = shape, value("I"), value("Q")
    step = int(found.get("general.alignment") or 32)
    first = -(-f.tell() // step) * step
    held = {name: (shape, kind, first + at) for name, (shape, kind, at) in places.items()}
    return Header(path, found, held)
