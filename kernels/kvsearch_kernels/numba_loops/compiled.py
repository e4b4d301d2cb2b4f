# mypy: ignore-errors
"""How loops are compiled, and when what was compiled is used again."""

import hashlib
from pathlib import Path

from numba import njit

LOOSE = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity mean the same


def _version() -> str:
    """What the files of this folder say: loops call each other and read each other's numbers."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


_VERSION = _version()


def compiled(fastmath=False):
    """`njit` that keeps what it compiled, where there is a place to keep it.

    numba's cache would notice a change of the file that a function is in, and of no other. So the
    name that it is kept by says what all files are.
    """

    def wrap(function):
        function.__qualname__ += f"-{_VERSION}"
        try:
            return njit(cache=True, nogil=True, fastmath=fastmath)(function)
        except RuntimeError:  # neither beside the file nor in the user's cache folder
            return njit(nogil=True, fastmath=fastmath)(function)

    return wrap
