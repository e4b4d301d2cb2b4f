"""How many programs share the slots of a part.

A multiprocessor runs a few programs at once, and those of `decode_attention` wait for memory and
for their own results more than for each other: so how long all take is a matter of how many waves
there are, and of the longest program of a wave. On a GPU with room for 396 programs, 256 heads with
a program each leave a third of the room empty; with two each, 116 programs are left for a second
wave. With three each, two waves are nearly full.
"""

from functools import lru_cache

from kvsearch_kernels.configs import DECODE_COST
from kvsearch_kernels.launch import ceil_div
from kvsearch_kernels.quantize_kv.reference import Format

WAVES = 4  # at most, that are considered
START = 768.0  # what a program costs before its first slot, in slots of cost 1: a guess


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
    for waves in range(1, WAVES + 1 if room else 1):
        aim = total / (waves * room)
        for rounded in (int, round):
            counts = tuple(max(1, min(most, rounded(cost / aim))) for cost, most in parts)
            longest = max(
                ceil_div(most, n) * cost / most
                for n, (cost, most) in zip(counts, parts, strict=True)
            )
            programs = sum(n * row for n, row in zip(counts, rows, strict=True))
            took = ceil_div(programs, room) * (longest + START)
            if took < least:
                best, least = counts, took
    return best
