"""Which request holds what, told from its blocks alone.

A worker is given each request's row of blocks and is not told when a request ends or is preempted:
its blocks just turn up in other rows. A request is therefore known by its first block, and it is
forgotten when one of its blocks is given away. What all requests hold never exceeds the blocks
that there are, because no block counts for two of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from kvsearch.errors import RunError

T = TypeVar("T")


class Table(Generic[T]):
    """Requests by their first block.

    Args:
        make: what a request starts with.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._held: dict[int, T] = {}
        self._rows: dict[int, list[int]] = {}
        self._owner: dict[int, int] = {}  # block -> first block of its request

    def claim(self, row: Sequence[int], *, fresh: bool) -> T:
        """What the request with these blocks holds; others that had any of them are forgotten.

        Args:
            row: its blocks now, in the order in which it was given them.
            fresh: whether it starts, or starts again after it was preempted.

        Raises:
            RunError: it goes on, and this worker has not seen how it started.
        """
        first = row[0]
        if fresh:
            self._forget(first)
            self._held[first], self._rows[first] = self._make(), []
        elif first not in self._held:
            raise RunError(
                "a request goes on after tokens that this worker has not seen; turn off prefix "
                "caching, speculative decoding and KV transfer"
            )
        mine = self._rows[first]
        for block in row[len(mine) :]:
            other = self._owner.get(block)
            if other is not None and other != first:
                self._forget(other)
            self._owner[block] = first
            mine.append(block)
        return self._held[first]

    def _forget(self, first: int) -> None:
        self._held.pop(first, None)
        for block in self._rows.pop(first, ()):
            del self._owner[block]

    def __iter__(self) -> Iterator[T]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def blocks(self) -> int:
        """Blocks that count for a request."""
        return len(self._owner)
