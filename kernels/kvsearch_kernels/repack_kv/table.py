"""The table of `repack_kv`: a row for the keys, and one for the values, of each head of each pool.

    0 source, 1 slots, 2 format, 3 rows of the result, 4 their scales, 5 levels of the format, 6 the
    edges between them, 7 which part moves or -1, 8 parts; then for each part
    0 format, 1 rows, 2 their scales, 3 first slot, 4 slots

Addresses are in bytes, and those of the head's own rows. Formats are numbers of `kinds_of`.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvsearch_kernels.addresses import Rows, readable, rows_at
from kvsearch_kernels.launch import rows_last
from kvsearch_kernels.packed_attention.limits import MOST_PARTS
from kvsearch_kernels.packed_attention.reference import slots_of
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import steps_of, tables
from kvsearch_kernels.repack_kv.reference import Held, NewPool

HEAD, PART = 9, 5  # columns before those of parts, and of each of these
COLUMNS = HEAD + MOST_PARTS * PART


def kinds_of(pools: Sequence[NewPool]) -> list[Format | None]:
    """Formats of keys and values of all parts and results, each once, in an order of their own.

    Which parts are held changes from compaction to compaction; a kernel for the same formats must
    not be compiled again for that.
    """
    pairs = [(p.key_format, p.value_format) for pool in pools for p in pool.parts]
    pairs += [pool.formats for pool in pools]
    return sorted({fmt for pair in pairs for fmt in pair}, key=lambda fmt: constants(fmt, 1 << 20))


def constants(fmt: Format | None, D: int) -> tuple[int, int, bool, int]:
    """Compile-time description of a format: bits, group, Lloyd-Max levels, `steps_of` rotation."""
    if fmt is None:
        return 16, D, False, 0
    return fmt.bits, fmt.group, fmt.levels == "lloyd", steps_of(fmt, D)


def heads_of(pool: NewPool) -> tuple[int, int, int]:
    """Batch rows, KV heads and channels of a pool, as its first part has them."""
    part = pool.parts[0]
    x = part.keys.codes if isinstance(part.keys, Packed) else part.keys
    bits = 8 if part.key_format is None else part.key_format.bits
    return x.shape[0], x.shape[1], x.shape[-1] * 8 // bits


def rows_of(
    pool: NewPool, made: tuple[Held, Held], kinds: Sequence[Format | None], D: int,
    kept: list[Tensor],
) -> Rows:  # fmt: skip
    """Rows of a pool `[B * H * 2, COLUMNS]`; what they point to must be `kept` until the launch."""
    B, H, _ = heads_of(pool)
    rows = np.zeros((B, H, 2, COLUMNS), np.int64)
    source = rows_last(pool.source)
    kept.append(source)
    rows[..., 0] = rows_at(source.expand(B, H, source.shape[-1]))[..., None]
    rows[..., 1], rows[..., 8] = source.shape[-1], len(pool.parts)
    rows[..., 7] = -1 if pool.own is None else pool.own
    for side, (held, fmt) in enumerate(zip(made, pool.formats, strict=True)):
        mine = rows[:, :, side]
        mine[..., 2] = kinds.index(fmt)
        mine[..., 3:5] = _held_at(held, kept)
        levels = tables(1 if fmt is None else fmt.bits, source.device)  # of Lloyd-Max, or not read
        mine[..., 5:7] = [x.data_ptr() for x in levels]
        start = 0
        for i, part in enumerate(pool.parts):
            at = HEAD + PART * i
            x, form = ((part.keys, part.key_format), (part.values, part.value_format))[side]
            mine[..., at] = kinds.index(form)
            mine[..., at + 1 : at + 3] = _held_at(x, kept)
            mine[..., at + 3], mine[..., at + 4] = start, slots_of(part)
            start += slots_of(part)
    return rows.reshape(-1, COLUMNS)


def _held_at(held: Held, kept: list[Tensor]) -> Rows:
    """Addresses of rows and scales `[B, H, 2]`; those of 16 bits stand for their scales."""
    sides = (held.codes, held.scales.flatten(-2)) if isinstance(held, Packed) else (held, held)
    found = [readable(x) for x in sides]
    kept += found
    return np.stack([rows_at(x) for x in found], -1)
