"""What requests hold, on vLLM's own `/metrics`.

The process that attends is not the one that answers HTTP. So the counts lie in a small file that
both map: the first process that serves a policy makes it and names it in the environment, which the
others inherit. Once mapped it is there for both, also where something clears the temporary folder.
"""

import atexit
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from time import perf_counter
from typing import Any

PLACE = "_KVSEARCH_COUNTS"  # environment variable with the file
COUNTS = {
    "requests": "Requests whose tokens are held.",
    "counted_bytes": "Bytes of the blocks that vLLM counts for them.",
    "resident_bytes": "Bytes of their tensors, when they were last added up.",
    "memory_share": "Resident bytes in all that vLLM may give to the cache.",
    "compactions": "Compactions of requests, of all layers together.",
}
_FORM = struct.Struct(f"{len(COUNTS)}d")
SPENT = 0.01  # share of the time that adding up all tensors may take


@cache
def publish() -> None:
    """Show the counts where this process answers `/metrics`."""
    import prometheus_client

    if not os.path.exists(os.environ.get(PLACE, "")):
        handle, name = tempfile.mkstemp(prefix="kvsearch-counts-")
        os.write(handle, _FORM.pack(*[0.0] * len(COUNTS)))
        os.close(handle)
        os.environ[PLACE] = name
        atexit.register(_remove, name, os.getpid())
    prometheus_client.REGISTRY.register(_Collector())


def _remove(name: str, owner: int) -> None:
    if os.getpid() == owner:  # a fork ends earlier
        with suppress(OSError):
            os.unlink(name)


class _Collector:
    """What prometheus_client asks at every scrape."""

    def __init__(self) -> None:
        self._map = shared()

    def collect(self) -> Iterator[Any]:
        """The counts, as its families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in counted(self._map).items():
            kind = CounterMetricFamily if name == "compactions" else GaugeMetricFamily
            yield kind(f"kvsearch:{name}", COUNTS[name], value=value)


def shared() -> mmap.mmap | None:
    """The counts, as every process of a server sees them; None where there is no file."""
    with suppress(OSError), open(os.environ.get(PLACE, ""), "r+b") as f:
        return mmap.mmap(f.fileno(), _FORM.size)
    return None


def counted(shared: mmap.mmap | None) -> dict[str, float]:
    """The counts by name; nothing without any."""
    return {} if shared is None else dict(zip(COUNTS, _FORM.unpack(shared[:]), strict=True))


class Counts:
    """Where the process that attends writes them."""

    def __init__(self) -> None:
        self._at = self._compactions = 0.0
        self._resident = 0
        self._map = shared()

    def note(self, held: Any, *, counted: int, room: int, compactions: int) -> None:
        """Write what is held after a step.

        Args:
            held: layers of each request, a `Table`.
            counted: bytes of its blocks.
            room: bytes that the cache may take.
            compactions: those that the step made.
        """
        self._compactions += compactions
        if self._map is None:
            return
        start = perf_counter()
        if start >= self._at:
            self._resident = sum(layer.nbytes for layers in held for layer in layers)
            self._at = start + (perf_counter() - start) / SPENT
        found = len(held), counted, self._resident, self._resident / max(1, room), self._compactions
        self._map[:] = _FORM.pack(*map(float, found))
