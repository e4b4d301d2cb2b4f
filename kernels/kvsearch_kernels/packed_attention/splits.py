"""How many programs share the slots of a part.

A multiprocessor runs some programs at once, and those of `decode_step` wait for memory and for
their own results more than for each other: so how long all take is a matter of how many waves there
are, and of the longest program of a wave. On a GPU with room for 1056 programs, 700 heads with a
program each leave a third of the room empty; with two each, 344 programs are left for a second
wave. With three each, two waves are nearly full. Where there are few heads, what joins the results
of their programs takes long as well.
"""

from functools import lru_cache

from kvsearch_kernels.configs import DECODE_COST
from kvsearch_kernels.launch import ceil_div
from kvsearch_kernels.quantize_kv.reference import Format

WAVES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 3, 4, 6, 8)  # that are considered
# Guesses, in slots of cost 1: what a program costs before its first slot, and what its result costs
# those that are joined.
START, JOIN = 256.0, 4.0


def cost_of(slots: int, pair: tuple[Format | None, Format | None]) -> float:
    """What attending to `slots` costs, whose keys and values have the formats of `pair`."""
    return slots * sum(DECODE_COST[16 if f is None else f.bits] for f in pair)


@lru_cache(256)  # from compaction to compaction they are mostly the same
def splits(
    costs: tuple[float, ...], tiles: tuple[int, ...], rows: tuple[int, ...], room: int
) -> tuple[int, ...]:
    """Programs of each part, 1 to its tiles.

    Args:
        costs: of each part in one head and sequence, see `cost_of`.
        tiles: that each has there.
        rows: heads and sequences that have it.
        room: programs that the GPU runs at once.
    """
    parts = [*zip(costs, tiles, strict=True)]
    total = sum(cost * n for cost, n in zip(costs, rows, strict=True))
    best, least = (1,) * len(parts), float("inf")
    for waves in WAVES if room else ():
        aim = total / (waves * room)
        for less in (0, 1):  # a program has whole tiles: as many as that takes, or one less
            counts = tuple(
                ceil_div(most, max(1, ceil_div(most, max(1, int(cost / aim))) - less))
                for cost, most in parts
            )
            longest = max(
                ceil_div(most, n) * cost / most
                for n, (cost, most) in zip(counts, parts, strict=True)
            )
            programs = sum(n * row for n, row in zip(counts, rows, strict=True))
            took = ceil_div(programs, room) * (longest + START) + JOIN * max(counts)
            if took < least:
                best, least = counts, took
    return best
