# mypy: ignore-errors
"""Kernel of `gather_kv`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["n"])
def gather(
    x, slots, cos, sin, out, sxb, sxh, sxn, ssb, ssh, ssn, scb, sch, scn, n, H,
    D: tl.constexpr, PAD: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr, TURN: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens of one head. `out` is contiguous; HALF pairs turn. WIDE and PAD are
    HALF and D up to the next power of two."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < n
    at = slots + b * ssb + h * ssh + t * ssn
    source = tl.load(at, mask=inside, other=0).to(tl.int64)
    x_row = (x + b * sxb + h * sxh + source * sxn)[:, None]
    out_row = (out + (bh.to(tl.int64) * n + t) * D)[:, None]
    d = tl.arange(0, PAD)[None, :]
    if TURN:
        i = tl.arange(0, WIDE)[None, :]
        pair = inside[:, None] & (i < HALF)
        low = tl.load(x_row + i, mask=pair, other=0.0).to(tl.float32)
        high = tl.load(x_row + HALF + i, mask=pair, other=0.0).to(tl.float32)
        angle_at = (b * scb + h * sch + t * scn)[:, None] + i
        c = tl.load(cos + angle_at, mask=pair, other=0.0)
        s = tl.load(sin + angle_at, mask=pair, other=0.0)
        kind = out.dtype.element_ty
        tl.store(out_row + i, (low * c - high * s).to(kind), mask=pair)
        tl.store(out_row + HALF + i, (high * c + low * s).to(kind), mask=pair)
        if 2 * HALF < D:
            rest = inside[:, None] & (d >= 2 * HALF)
            tl.store(out_row + d, tl.load(x_row + d, mask=rest, other=0.0), mask=rest)
    else:
        whole = inside[:, None] if PAD == D else inside[:, None] & (d < D)
        tl.store(out_row + d, tl.load(x_row + d, mask=whole, other=0), mask=whole)
