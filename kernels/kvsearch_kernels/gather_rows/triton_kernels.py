# mypy: ignore-errors
"""Kernel of `gather_rows`. Columns of the table's rows are named in `triton_impl._rows`."""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer

COLUMNS = tl.constexpr(18)
HEAD = tl.constexpr(6)
PART = tl.constexpr(3)


@triton.jit
def _copy(
    where, out, to, units, inside, kind: tl.constexpr, EACH: tl.constexpr, BC: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """Rows at addresses `where` to rows `to` of the result, `units` of EACH words of a `kind`.

    A row begins where BYTES can be loaded at once.
    """
    words = units * EACH
    row = tl.multiple_of(where.to(tl.pointer_type(kind)), BYTES)[:, None]
    back = (out.to(tl.pointer_type(kind)) + to * words)[:, None]
    back = tl.multiple_of(back, [BYTES, BYTES])
    for first in range(0, words, BC):
        c = first + tl.arange(0, BC)[None, :]
        there = inside[:, None] & (c < words)
        tl.store(back + c, tl.load(row + c, mask=there, other=0), mask=there)


@triton.jit
def gather_all(table, BT: tl.constexpr):
    """One program: BT rows of one head of one tensor."""
    row = table + tl.program_id(1).to(tl.int64) * COLUMNS
    n = tl.load(row + 1)
    first = tl.program_id(0).to(tl.int64) * BT
    if first < n:  # other tensors may have more rows
        to = first + tl.arange(0, BT)
        inside = to < n
        at = tl.load(pointer(row, tl.int64, 8) + to, mask=inside, other=0)
        out = tl.load(row + 2)
        units = tl.load(row + 3)
        unit = tl.load(row + 4)
        size = units * tl.where(unit == 0, 16, tl.where(unit == 1, 2, 1))
        where = tl.zeros([BT], tl.int64)
        for p in range(0, tl.load(row + 5).to(tl.int32)):
            part = row + HEAD + p * PART
            slot = at - tl.load(part + 1)
            here = (slot >= 0) & (slot < tl.load(part + 2))
            where = tl.where(here, tl.load(part) + slot * size, where)
        if unit == 0:
            _copy(where, out, to, units, inside, tl.int64, 2, 16, 16)
        elif unit == 1:
            _copy(where, out, to, units, inside, tl.int16, 1, 16, 2)
        else:
            _copy(where, out, to, units, inside, tl.uint8, 1, 32, 1)
