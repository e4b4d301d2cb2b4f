"""Which slots are evicted when, in integers: what the cache, the evaluation and the reports read.

Compactions follow from the number of tokens seen. Without a rule, so does everything else: which
slots stay, which rungs a ladder keeps, which tier a slot moves into. No torch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from kvsearch.policy.ladder import Rungs

NEVER = 1 << 40
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Trigger = Literal["stream", "prompt", "prompt+stream", "generation"]


@dataclass(frozen=True)
class Clock:
    """When a layer is compacted.

    Attributes:
        interval: tokens between compactions; None never compacts.
        trigger: see `Policy`.
    """

    interval: int | None
    trigger: Trigger

    def due(self, seen: int, prompt: int = 0) -> bool:
        """Whether the layer compacts after its `seen`-th token (prompt tokens included)."""
        c = self.interval
        if c is None:
            return False
        if self.trigger == "stream":
            return seen % c == 0
        if self.trigger == "prompt":
            return seen == prompt
        return seen >= prompt and (seen - prompt) % c == 0

    def after(self, seen: int, prompt: int = 0) -> int | None:
        """Smallest number of tokens seen, above `seen`, at which the layer compacts."""
        c = self.interval
        if c is None:
            return None
        if self.trigger == "stream":
            return (seen // c + 1) * c
        if seen < prompt:
            return prompt
        if self.trigger == "prompt":
            return None
        return prompt + ((seen - prompt) // c + 1) * c

    def first(self, seen: Ints, prompt: int = 0) -> Ints:
        """Smallest compaction at or after each number of tokens seen; `NEVER` if there is none."""
        c = self.interval
        if c is None:
            return np.full_like(seen, NEVER)
        if self.trigger == "stream":
            return -(-seen // c) * c
        later = np.full_like(seen, NEVER)
        if self.trigger != "prompt":
            later = prompt + -((prompt - seen) // c) * c
        return np.where(seen <= prompt, prompt, later)


class Block(NamedTuple):
    """One ladder laid over slots in order of time.

    Attributes:
        start: first slot of the `B` slots that it covers, counted when it is laid.
        fresh: whether a new pass over the slots begins here.
    """

    start: int
    fresh: bool


@dataclass(frozen=True)
class Evictions:
    """What a compaction of one layer drops, by age or rung.

    Attributes:
        target: slots left after a compaction, at most; None keeps everything.
        sinks: first slots, never dropped.
        spared: newest slots that a ladder keeps off.
        rungs: integers of the ladder, or None.
        offset: first kept rung of this layer's ladders.
    """

    target: int | None
    sinks: int
    spared: int
    rungs: Rungs | None
    offset: int

    def left(self, n: int) -> int:
        """Slots left when a compaction finds `n`."""
        if self.target is None or n <= self.target:
            return n
        if self.rungs is None:
            return self.target
        return n - -(-(n - self.target) // self.rungs.R) * self.rungs.R

    def blocks(self, n: int, cursor: int) -> tuple[list[Block], int]:
        """Ladders that a compaction of `n` slots lays from `cursor` on, until the target is met.

        A pass that reaches the spared slots begins again behind the sinks (LaCache's iterative
        compaction). Returns the blocks in order, and the cursor after them.
        """
        r, found = self.rungs, list[Block]()
        assert r is not None and self.target is not None
        cursor = max(cursor, self.sinks)
        while n > self.target:
            fresh = n - 1 - cursor - self.spared < r.A
            if fresh:
                cursor = self.sinks
            found.append(Block(cursor, fresh))
            cursor += r.A
            n -= r.R
        return found, cursor

    def by_age(self, n: int, cursor: int) -> tuple[Ints | None, int]:
        """Slots that stay when age alone decides, rising, or None if all do; and the new cursor."""
        if self.target is None or n <= self.target:
            return None, cursor
        slots = np.arange(n, dtype=np.int64)
        if self.rungs is None:
            stays = [slots[: self.sinks], slots[self.sinks + n - self.target :]]
            return np.concatenate(stays), cursor
        blocks, cursor = self.blocks(n, cursor)
        for start, _ in blocks:
            kept = slots[start + self.offset : start + self.offset + self.rungs.A]
            slots = np.concatenate([slots[:start], kept, slots[start + self.rungs.B :]])
        return slots, cursor


def pools_by_age(
    counts: tuple[int, ...], n: int, fp16_recent: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Pool of each of `n` slots in order of time, the newest in the best tier `[N]` uint8.

    Slots in no tier, which are 16-bit sinks and the `fp16_recent` newest, are in the last pool,
    `len(counts)`.
    """
    pools = np.full(n, len(counts), dtype=np.uint8)
    end = max(0, n - fp16_recent)
    for tier, count in enumerate(counts):
        pools[end - count : end] = tier
        end -= count
    return pools
