# mypy: ignore-errors
"""Kernels of `quantize_kv` and its inverse; `read_codes` is also how decoding reads a cache."""

import triton
import triton.language as tl


@triton.constexpr_function
def norm_of(STEPS):
    """What makes a transform of blocks of `2**STEPS` channels orthonormal."""
    return (1 << STEPS) ** -0.5


@triton.jit
def hadamard(x, BT: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr):
    """Orthonormal Hadamard transform of the rows of `[BT, D]`, in blocks of `2**STEPS` channels.

    The same sums and differences in the same order as the reference, so the bits agree.
    """
    d = tl.arange(0, D)
    for s in tl.static_range(STEPS):
        other = tl.broadcast_to((d ^ (1 << s))[None, :], [BT, D])
        partner = tl.gather(x, other, axis=1)
        x = tl.where((d & (1 << s))[None, :] != 0, partner - x, x + partner)
    return x * norm_of(STEPS)


@triton.jit
def to_codes(g, levels, edges, BITS: tl.constexpr, LLOYD: tl.constexpr, GROUP: tl.constexpr):
    """Codes of `[BT, groups, GROUP]`, and scale and zero `[BT, groups]` in fp16."""
    top: tl.constexpr = 2**BITS - 1
    if LLOYD:
        scale = tl.maximum(tl.sqrt_rn(tl.sum(g * g, 2) / GROUP), 1e-8)
        v = tl.div_rn(g, tl.broadcast_to(scale[:, :, None], g.shape))
        codes = tl.zeros(g.shape, tl.int32)
        for i in tl.static_range(BITS):  # binary search: how many edges lie below
            edge = tl.load(edges + codes + ((1 << (BITS - 1 - i)) - 1))
            codes += tl.where(edge < v, 1 << (BITS - 1 - i), 0)
        fitted = tl.load(levels + codes)
        step = tl.div_rn(tl.sum(g * fitted, 2), tl.sum(fitted * fitted, 2)).to(tl.float16)
        return codes, step, step
    elif BITS == 1:
        mean = tl.sum(g, 2) / GROUP
        off = g - mean[:, :, None]
        spread = tl.sum(tl.abs(off), 2) / GROUP
        codes = (g > mean[:, :, None]).to(tl.int32)
        return codes, (2.0 * spread).to(tl.float16), (mean - spread).to(tl.float16)
    else:
        low = tl.min(g, 2)
        width = tl.max(g, 2) - low
        step = tl.div_rn(width, tl.full(width.shape, top, tl.float32)).to(tl.float16)
        zero = low.to(tl.float16)
        over = tl.maximum(step.to(tl.float32), 1e-8)
        v = g - zero.to(tl.float32)[:, :, None]
        v = tl.div_rn(v, tl.broadcast_to(over[:, :, None], g.shape))
        v = tl.minimum(tl.maximum(v, 0.0), top + 0.0)
        # adding 2**23 rounds halves to even, as torch does; rounding after the clamp is the same
        return ((v + 8388608.0) - 8388608.0).to(tl.int32), step, zero


@triton.jit
def _plane(codes, BT: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr):
    """Bytes `[BT, D * BITS / 8]`: channels i, i + D/n, i + 2D/n, ... share byte i.

    Pairs are joined, not summed: an H200 stored wrong codes where Triton 3.6 had to sum an axis
    whose warps lie between those of another, which a reshape can bring about.
    """
    n: tl.constexpr = 8 // BITS
    x = tl.permute(tl.reshape(codes, [BT, n, D // n]), (0, 2, 1))
    for i in tl.static_range(3 if BITS == 1 else (2 if BITS == 2 else 1)):
        pairs = tl.reshape(x, [BT, D // n, n >> (i + 1), 2])
        even, odd = tl.split(pairs)
        x = even | (odd << (BITS << i))
    return tl.reshape(x, [BT, D // n]).to(tl.uint8)


@triton.jit
def write_codes(
    values, codes, scales, levels, edges, to, inside, D: tl.constexpr, GROUP: tl.constexpr,
    BITS: tl.constexpr, LLOYD: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Quantise `values` `[BT, D]` fp32 and write them to rows `to`, where `inside`.

    They are rotated before, unless STEPS is 0.
    """
    if STEPS:
        values = hadamard(values, BT, D, STEPS)
    groups: tl.constexpr = D // GROUP
    grouped = tl.reshape(values, [BT, groups, GROUP])
    found, step, zero = to_codes(grouped, levels, edges, BITS, LLOYD, GROUP)
    found = tl.reshape(found, [BT, D])
    bytes_a_token: tl.constexpr = D * BITS // 8
    row = codes + to[:, None] * bytes_a_token
    if BITS == 8:
        tl.store(row + tl.arange(0, D)[None, :], found.to(tl.uint8), mask=inside[:, None])
    elif BITS == 3 or BITS == 5:
        LOW: tl.constexpr = BITS - 1
        share: tl.constexpr = D * LOW // 8
        low = tl.arange(0, share)
        top = tl.arange(0, D // 8)
        lower = _plane(found & (2**LOW - 1), BT, D, LOW)
        tl.store(row + low[None, :], lower, mask=inside[:, None])
        tl.store(row + share + top[None, :], _plane(found >> LOW, BT, D, 1), mask=inside[:, None])
    else:
        i = tl.arange(0, bytes_a_token)
        tl.store(row + i[None, :], _plane(found, BT, D, BITS), mask=inside[:, None])
    g = tl.arange(0, groups)
    numbers: tl.constexpr = 1 if LLOYD else 2
    scale_at = scales + to[:, None] * (groups * numbers) + g[None, :] * numbers
    tl.store(scale_at, step, mask=inside[:, None])
    if not LLOYD:
        tl.store(scale_at + 1, zero, mask=inside[:, None])


@triton.jit(do_not_specialize=["n"])
def quantize(
    x, levels, edges, codes, scales, sxb, sxh, sxn, n, H,
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, LLOYD: tl.constexpr,
    STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: BT tokens of one head. `codes` and `scales` are contiguous."""
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BT
    t = tl.arange(0, BT)
    d = tl.arange(0, D)
    inside = first + t < n
    x_at = x + b * sxb + h * sxh + (first + t)[:, None] * sxn + d[None, :]
    values = tl.load(x_at, mask=inside[:, None], other=0.0).to(tl.float32)
    to = bh.to(tl.int64) * n + first + t
    write_codes(
        values, codes, scales, levels, edges, to, inside, D, GROUP, BITS, LLOYD, STEPS, BT,
    )  # fmt: skip


@triton.jit
def read_codes(row, d, inside, D: tl.constexpr, BITS: tl.constexpr):
    """Codes int32 of channels `d` of packed rows; `row` and `inside` broadcast with `d`.

    A byte is read once per channel that it holds: neighbouring channels are neighbouring bytes, so
    these are wide loads that hit the cache, and no shuffle is needed.
    """
    if BITS == 8:
        return tl.load(row + d, mask=inside, other=0).to(tl.int32)
    elif BITS == 3 or BITS == 5:
        LOW: tl.constexpr = BITS - 1
        share: tl.constexpr = D * LOW // 8
        lower = tl.load(row + d % share, mask=inside, other=0).to(tl.int32)
        top = tl.load(row + share + d % (D // 8), mask=inside, other=0).to(tl.int32)
        low = (lower >> (d // share * LOW)) & (2**LOW - 1)
        return low | (((top >> (d // (D // 8))) & 1) << LOW)
    else:
        share: tl.constexpr = D * BITS // 8
        packed = tl.load(row + d % share, mask=inside, other=0).to(tl.int32)
        return (packed >> (d // share * BITS)) & (2**BITS - 1)


@triton.jit(do_not_specialize=["n"])
def dequantize(
    codes, scales, levels, out, n,
    D: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, LLOYD: tl.constexpr,
    STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: BT of `n` packed rows; all tensors are contiguous."""
    first = tl.program_id(0).to(tl.int64) * BT
    t = first + tl.arange(0, BT)
    d = tl.arange(0, D)
    inside = (t < n)[:, None]
    found = read_codes(codes + t[:, None] * (D * BITS // 8), d[None, :], inside, D, BITS)
    numbers: tl.constexpr = 1 if LLOYD else 2
    scale_at = scales + t[:, None] * (D // GROUP * numbers) + (d // GROUP)[None, :] * numbers
    step = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
    if LLOYD:
        values = tl.load(levels + found) * step
    else:
        # code x step has at most 19 bits: exact, so a fused multiply-add rounds as torch does
        zero = tl.load(scale_at + 1, mask=inside, other=0.0).to(tl.float32)
        values = found.to(tl.float32) * step + zero
    if STEPS:
        values = hadamard(values, BT, D, STEPS)
    tl.store(out + t[:, None] * D + d[None, :], values.to(out.dtype.element_ty), mask=inside)
