"""Tile sizes of the kernels, per shape; a table instead of an autotuner, so that runs repeat.

Every entry compiles without spills for sm_90, those of AMPERE and of decoding for sm_80
(`tests/kernels/compiled`). Those of decoding with 128 channels were tried on an H200
(`studies/2026-11-gpu`); the others are guesses from register counts, timed there.
"""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile of scores, warps of a program, stages of its pipeline."""

    rows: int
    columns: int
    warps: int
    stages: int

    def as_dict(self) -> dict[str, int]:
        """For records of what ran."""
        return asdict(self)


# (head_dim, bytes per element) -> tile
# fp32 does not use tensor cores: it is for checks, not for speed.
# Keys of `lifetime_attention` are found by a table, whose loads are a stage of their own: with five
# stages a tile is loaded while one is attended to, with four none is.
ATTEND = {
    (64, 2): Tile(128, 128, 8, 5),
    (128, 2): Tile(128, 64, 8, 5),
    (256, 2): Tile(128, 32, 8, 5),
    (64, 4): Tile(32, 32, 4, 2),
    (128, 4): Tile(32, 32, 16, 1),
    (256, 4): Tile(32, 32, 16, 1),
}
ATTEND_CAPPED = {(256, 2): Tile(128, 16, 8, 5)}  # tanh needs registers
# before sm_90 products come out of registers, so tiles are smaller; these also fit triton 3.6
ATTEND_AMPERE = {
    (64, 2): Tile(128, 32, 8, 5),
    (128, 2): Tile(64, 64, 8, 5),
    (256, 2): Tile(64, 32, 8, 2),  # more would not fit sm_86 and sm_89
}
SCORE = {
    (64, 2): Tile(64, 64, 4, 3),
    (128, 2): Tile(64, 64, 4, 3),
    (256, 2): Tile(64, 64, 8, 2),
    (64, 4): Tile(32, 32, 4, 2),
    (128, 4): Tile(32, 32, 8, 1),
    (256, 4): Tile(32, 32, 16, 1),
}


def attend_tile(head_dim: int, itemsize: int, capped: bool, *, ampere: bool = False) -> Tile:
    """Tile of `lifetime_attention`; `ampere` for GPUs before sm_90."""
    key = head_dim, itemsize
    if ampere and key in ATTEND_AMPERE:
        return ATTEND_AMPERE[key]
    return ATTEND_CAPPED.get(key, ATTEND[key]) if capped else ATTEND[key]


QUANTIZE_ROWS = 16  # tokens of a program
QUANTIZE_WARPS = 4
REPACK_ROWS = 16
RECEIVE_COLUMNS = 512  # slots of a program that adds up what slots received
RECEIVE_WARPS = 4

# (head_dim, bytes per element of the queries) -> keys of a tile as columns; half as many for a part
# whose format is expanded to 16 or 32 bits a channel. Rows are the least query heads of a group.
# In 16 bits a program is one warp where registers allow it: it waits for no other, and reads
# nothing that another reads.
DECODE = {
    (64, 2): Tile(8, 64, 1, 3),
    (128, 2): Tile(8, 32, 1, 3),
    (256, 2): Tile(8, 32, 2, 3),
    (64, 4): Tile(8, 64, 4, 1),
    (128, 4): Tile(8, 64, 4, 1),
    (256, 4): Tile(8, 64, 16, 1),
}
# The same where formats need more registers, see `decode_tile`: keys of a tile and warps.
DECODE_LOADED = {64: (32, 1), 128: (64, 2), 256: (32, 2)}
# Query heads of a group -> keys of a tile and warps, for more than eight.
DECODE_MORE = {16: (32, 2), 32: (64, 4), 64: (32, 4)}
# Warps of a multiprocessor, by which slots are shared out among programs. Registers have room for
# more, but on an H200 fewer and longer programs were as fast or faster (`studies/2026-11-gpu`).
DECODE_WARPS = 8
# Share of splits per stored token, from the time per token that kernels.md estimates.
DECODE_COST = {16: 7.4, 8: 3.8, 5: 2.4, 4: 2.0, 3: 1.6, 2: 1.05, 1: 1.0}


def decode_tile(head_dim: int, itemsize: int, heads: int, *, loaded: bool, lookups: bool) -> Tile:
    """Tile of the attention of `decode_step`.

    Args:
        head_dim: of keys and values.
        itemsize: bytes of an element of the queries.
        heads: of queries, for each of keys.
        loaded: whether levels are looked up, a vector has several scales, or a launch the code of
            many formats.
        lookups: whether some levels come from a table in memory.
    """
    tile = DECODE[head_dim, itemsize]
    tile = replace(tile, rows=max(tile.rows, 1 << (heads - 1).bit_length()))
    if itemsize == 4:
        return replace(tile, warps=max(8, tile.warps)) if lookups else tile
    columns, warps = tile.columns, tile.warps
    if tile.rows > 8:
        columns, warps = DECODE_MORE[tile.rows]
    elif loaded:
        columns, warps = DECODE_LOADED[head_dim]
    return replace(tile, columns=columns, warps=max(warps, 2) if lookups else warps)


EVICT_COPIED = 16  # rows that `evict_in_place` copies at once


def evict_tile(
    head_dim: int, itemsize: int, queries: int, slots: int, *, ampere: bool = False
) -> Tile:
    """Tile of `evict_in_place`: queries as rows, keys as columns.

    Args:
        head_dim: of keys and values; in fp32 at most 128.
        itemsize: bytes of an element of the queries.
        queries: of a KV head and interval.
        slots: of a head; to order many takes the registers of a third stage.
        ampere: for GPUs before sm_90.
    """
    if itemsize == 4:
        return Tile(16, 4096 // head_dim, 8, 1)
    if ampere:
        return Tile(32, 32 if head_dim == 256 else 64, 8, 2)
    most = 32 if head_dim == 256 else 64
    rows = min(most, max(16, 1 << (queries - 1).bit_length()))
    return Tile(rows, 64, 8, 2 if rows == 16 and slots > 2048 else 3)


def choose_warps(slots: int) -> int:
    """Warps of a program of `choose_slots`: it holds some 64-bit numbers of every slot."""
    return 4 if slots <= 1024 else 8


def repack_warps(head_dim: int, kinds: int) -> int:
    """Warps of a program of `repack_kv`, whose code grows with the `kinds` of formats.

    With four, 64 channels spill on sm_80; with more than seven kinds, all spill there at half of
    this but 128 channels.
    """
    warps = 8 if head_dim == 64 else 4
    return 2 * warps if kinds > 7 and head_dim != 128 else warps
