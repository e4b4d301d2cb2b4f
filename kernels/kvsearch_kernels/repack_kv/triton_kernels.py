# mypy: ignore-errors
"""Kernel of `repack_kv`. Columns of the table's rows are named in `table`."""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer
from kvsearch_kernels.packed_attention.read_kernels import values_of
from kvsearch_kernels.quantize_kv.triton_kernels import hadamard, write_codes

COLUMNS = tl.constexpr(29)
HEAD = tl.constexpr(9)
PART = tl.constexpr(5)


@triton.jit
def _rows(at, like, D: tl.constexpr, BITS: tl.constexpr):
    """Rows of a head whose address is `at`; those of 16 bits have the type of `like`."""
    return pointer(at, tl.uint8 if BITS < 16 else like.dtype.element_ty, D * BITS // 8)


@triton.jit
def _scales(at, D: tl.constexpr, GROUP: tl.constexpr, LLOYD: tl.constexpr):
    """Their scales."""
    return pointer(at, tl.float16, D // GROUP * (2 if LLOYD else 4))


@triton.jit
def _inside(part, at, inside):
    """Which of the slots `at` are in this part, and their place there."""
    start = tl.load(part + 3).to(at.dtype)
    here = inside & (at >= start) & (at < start + tl.load(part + 4).to(at.dtype))
    return here, tl.where(here, at - start, 0)


@triton.jit
def take(
    values, part, levels, between, native, at, inside, D: tl.constexpr, FORMATS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """`values` with those of the slots that are in this part, rounded to the type of `between`."""
    here, slot = _inside(part, at, inside)
    kind = tl.load(part)
    for i in tl.static_range(len(FORMATS)):
        if kind == i:
            BITS: tl.constexpr = FORMATS[i][0]
            held = _rows(part + 1, native, D, BITS)
            scales = _scales(part + 2, D, FORMATS[i][1], FORMATS[i][2])
            x = values_of(
                held, scales, levels, slot, here, D, BITS, FORMATS[i][1], FORMATS[i][2], tl.float32
            )
            if FORMATS[i][3]:
                x = hadamard(x, BT, D, FORMATS[i][3])
            x = x.to(between.dtype.element_ty).to(tl.float32)
            values = tl.where(here[:, None], x, values)
    return values


@triton.jit
def _move(
    part, row, native, slot, to, mine, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr,
):  # fmt: skip
    """Copy rows as they are. Rows of 3 and 5 bits are no power of two wide."""
    held = _rows(part + 1, native, D, BITS)
    out = _rows(row + 3, native, D, BITS)
    wide: tl.constexpr = D * BITS // 8 if BITS < 16 else D
    PAD: tl.constexpr = wide if BITS != 3 and BITS != 5 else (D // 2 if BITS == 3 else D)
    c = tl.arange(0, PAD)[None, :]
    there = mine[:, None] & (c < wide)
    x = tl.load(held + slot[:, None] * wide + c, mask=there, other=0)
    tl.store(out + to[:, None] * wide + c, x, mask=there)
    if BITS < 16:
        scales = _scales(part + 2, D, GROUP, LLOYD)
        out_scales = _scales(row + 4, D, GROUP, LLOYD)
        numbers: tl.constexpr = D // GROUP * (1 if LLOYD else 2)
        i = tl.arange(0, numbers)[None, :]
        x = tl.load(scales + slot[:, None] * numbers + i, mask=mine[:, None], other=0.0)
        tl.store(out_scales + to[:, None] * numbers + i, x, mask=mine[:, None])


@triton.jit
def _encode(
    values, row, native, to, new, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Write `values` to rows `to` where `new`, in the pool's format."""
    out = _rows(row + 3, native, D, BITS)
    if BITS == 16:
        d = tl.arange(0, D)[None, :]
        tl.store(out + to[:, None] * D + d, values.to(out.dtype.element_ty), mask=new[:, None])
    else:
        levels = pointer(row + 5, tl.float32, 4)
        edges = pointer(row + 6, tl.float32, 4)
        write_codes(
            values, out, _scales(row + 4, D, GROUP, LLOYD), levels, edges, to, new, D, GROUP, BITS,
            LLOYD, STEPS, BT,
        )  # fmt: skip


@triton.jit
def repack(
    table, levels, between, native, D: tl.constexpr, FORMATS: tl.constexpr, BT: tl.constexpr
):
    """One program: BT slots of one head of one pool, keys or values.

    Most slots of a pool were in it before, and move as they are; where all of a program do, nothing
    is decoded or encoded.
    `FORMATS` are those of a layer: bits, group, Lloyd-Max levels, steps of the rotation. Each is
    one branch of reading, of moving and of writing, so the code grows with their number and not
    with that of pools.
    `between` and `native` have the types of values in between and in 16 bits.
    """
    row = table + tl.program_id(1).to(tl.int64) * COLUMNS
    n = tl.load(row + 1).to(tl.int32)
    first = tl.program_id(0) * BT
    if first < n:  # other pools may be longer
        to = first + tl.arange(0, BT)
        inside = to < n
        at = tl.load(pointer(row, tl.int64, 8) + to, mask=inside, other=0).to(tl.int32)
        own = tl.load(row + 7).to(tl.int32)
        part = row + HEAD + tl.maximum(own, 0) * PART
        mine, slot = _inside(part, at, to < tl.where(own >= 0, n, 0))
        kind = tl.load(row + 2)
        for i in tl.static_range(len(FORMATS)):
            if kind == i:
                _move(
                    part, row, native, slot, to, mine, D, FORMATS[i][0], FORMATS[i][1],
                    FORMATS[i][2],
                )  # fmt: skip
        if tl.max((inside & (mine == 0)).to(tl.int32), 0) > 0:
            values = tl.zeros([BT, D], tl.float32)
            for p in range(0, tl.load(row + 8).to(tl.int32)):
                if p != own:
                    other = row + HEAD + p * PART
                    values = take(
                        values, other, levels, between, native, at, inside, D, FORMATS, BT
                    )  # fmt: skip
            # read and asked again: kept through the branches above they would take registers
            at = tl.load(pointer(row, tl.int64, 8) + to, mask=inside, other=0).to(tl.int32)
            mine, slot = _inside(part, at, inside & (own >= 0))
            new = inside & (mine == 0)
            for i in tl.static_range(len(FORMATS)):
                if kind == i:
                    _encode(
                        values, row, native, to, new, D, FORMATS[i][0], FORMATS[i][1],
                        FORMATS[i][2], FORMATS[i][3], BT,
                    )  # fmt: skip
