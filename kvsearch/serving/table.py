"""Which request holds what, told from its blocks alone.

A worker is given each request's row of blocks and is not told when a request ends or is preempted:
its blocks just turn up in other rows. A request is therefore known by its first block, and it is
forgotten when one of its blocks is given away. What all requests hold never exceeds the blocks
that there are, because no block counts for two of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvsearch.errors import RunError
from kvsearch.serving.account import Account, Row

T = TypeVar("T")


@dataclass
class _Request(Generic[T]):
    """What a request holds, and its blocks."""

    held: T
    row: Row
    blocks: set[int] = field(default_factory=set)


class Table(Generic[T]):
    """Requests by their first block.

    Args:
        make: what a request starts with, given the tokens of its prompt.
        account: counts blocks.
    """

    def __init__(self, make: Callable[[int], T], account: Account) -> None:
        self._make, self._account = make, account
        self._requests: dict[int, _Request[T]] = {}
        self._owner: dict[int, int] = {}  # block -> first block of its request

    def claim(self, row: Sequence[int], tokens: int, *, fresh: bool, prompt: int = 0) -> T:
        """What the request with these blocks holds; others that had any of them are forgotten.

        Args:
            row: its blocks now, in the order in which it was given them, and anything behind.
            tokens: of it, those that come now included.
            fresh: whether it starts, or starts again after it was preempted.
            prompt: tokens of its prompt, where the policy waits for its end.

        Raises:
            RunError: it goes on, and this worker has not seen how it started.
        """
        first = row[0]
        if fresh:
            self._forget(first)
            self._requests[first] = _Request(self._make(prompt), Row(self._account, prompt))
        elif first not in self._requests:
            raise RunError(
                "a request goes on after tokens that this worker has not seen; turn off prefix "
                "caching, speculative decoding and KV transfer"
            )
        mine = self._requests[first]
        waited = not mine.row.whole
        for entry in mine.row.grow(tokens):
            block = row[entry]
            other = self._owner.get(block)
            if other is not None and other != first:
                self._forget(other)
            self._owner[block] = first
            mine.blocks.add(block)
        if waited and mine.row.whole:  # this call is the last that needs them
            for entry in mine.row.gap:
                mine.blocks.discard(row[entry])
                del self._owner[row[entry]]
        return mine.held

    def _forget(self, first: int) -> None:
        gone = self._requests.pop(first, None)
        for block in () if gone is None else gone.blocks:
            del self._owner[block]

    def __iter__(self) -> Iterator[T]:
        return (mine.held for mine in self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def blocks(self) -> int:
        """Blocks that count for a request."""
        return len(self._owner)
