# mypy: ignore-errors
"""Kernel of `copy_rows`. Columns of the table's rows are named in `triton_impl._rows`."""

import triton
import triton.language as tl


@triton.jit
def _copy(row, first, size, kind: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
          BYTES: tl.constexpr):  # fmt: skip
    """BYTES from byte `first` on, as words of a `kind`; both ends divide by EVEN bytes."""
    at = first // WIDE + tl.arange(0, BYTES // WIDE)
    there = at < size // WIDE
    of = tl.multiple_of(tl.load(row).to(tl.pointer_type(kind)), EVEN)
    to = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(kind)), EVEN)
    tl.store(to + at, tl.load(of + at, mask=there, other=0), mask=there)


@triton.jit
def copy_all(table, BYTES: tl.constexpr):
    """One program: BYTES of one run."""
    row = table + tl.program_id(1).to(tl.int64) * 4
    size = tl.load(row + 2)
    kind = tl.load(row + 3)
    first = tl.program_id(0).to(tl.int64) * BYTES
    if first < size:  # other runs may be longer
        if kind == 0:
            # not `multiple_of`: its hint would hold for `size` in the other branches as well
            _copy(row, first, size // 16 * 16, tl.int64, 8, 16, BYTES)
        elif kind == 1:
            _copy(row, first, size, tl.int32, 4, 4, BYTES)
        elif kind == 2:
            _copy(row, first, size, tl.uint8, 1, 1, BYTES)
        else:
            at = first // 4 + tl.arange(0, BYTES // 4)
            to = tl.load(row + 1).to(tl.pointer_type(tl.int32))
            tl.store(to + at, tl.load(row).to(tl.int32), mask=at < size // 4)
