# mypy: ignore-errors
"""How `decode_attention` reads packed rows: as values, or as tensor-core operands in registers.

For affine formats with one scale a token that needs one AND-OR per pair of channels: the code, left
in place inside the mantissa of 1.0, is 1 + code * 2**(place - 10); the 1 and the power of two leave
through sums outside the loop.
"""

import triton
import triton.language as tl

from kvsearch_kernels.quantize_kv.triton_kernels import read_codes


@triton.jit
def values_of(
    held, scales, levels, row, inside, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Rows `[BN, D]` of any format as values of type `kind`."""
    d = tl.arange(0, D)[None, :]
    r = row[:, None]
    there = inside[:, None]
    if BITS == 16:
        return tl.load(held + r * D + d, mask=there, other=0.0).to(kind)
    else:
        codes = read_codes(held + r * (D * BITS // 8), d, there, D, BITS)
        if LLOYD:
            step = tl.load(scales + r * (D // GROUP) + d // GROUP, mask=there, other=0.0)
            # `levels` holds the tables of 1, 2, 3, 4 and 8 bits, one after the other
            table = levels + ((1 << BITS) - 2 if BITS < 8 else 30)
            return (tl.load(table + codes) * step.to(tl.float32)).to(kind)
        else:
            at = scales + r * (2 * (D // GROUP)) + d // GROUP * 2
            step = tl.load(at, mask=there, other=0.0).to(tl.float32)
            zero = tl.load(at + 1, mask=there, other=0.0).to(tl.float32)
            return (codes.to(tl.float32) * step + zero).to(kind)


@triton.jit
def affine(
    scales, row, inside, BITS: tl.constexpr, LLOYD: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Step and zero `[BN]` fp32 of group number `GROUP` in formats with evenly spaced levels."""
    if LLOYD:
        at = scales + row * GROUPS + GROUP
        s = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if BITS == 1:
            return s * 1.5958, s * -0.7979
        else:
            return s * (8.4 / 255), s * -4.2
    else:
        at = scales + row * (2 * GROUPS) + 2 * GROUP
        step = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        return step, tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def spread(
    held, row, inside, D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, UP: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Packed rows as uint16 `[BN, W]`: bits `UP + i * W * 8 / D` on hold channel `i * W + w`.

    W is the bytes of a row, or more where those are too few for a tile; then bytes are read several
    times, each time shifted to another of their channels.
    """
    share: tl.constexpr = D * BITS // 8
    w = tl.arange(0, W)
    packed = tl.load(
        held + row[:, None] * share + (w % share)[None, :], mask=inside[:, None], other=0
    )
    shift = (UP - w // share * BITS)[None, :].to(tl.uint16)
    if ASM:  # two instructions for four codes, where Triton would take eight
        wide = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;", "=r,=r,r",
            [packed], dtype=tl.uint16, is_pure=True, pack=4,
        )  # fmt: skip
        # also where the shift is always 0, which ptxas removes: a second operand keeps Triton from
        # moving bytes, not words, into the layout of the product, with a shuffle for every one
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; and.b32 t, $2, 15; shl.b32 $0, $1, t; }", "=r,r,r",
            [wide, tl.broadcast_to(shift, packed.shape)], dtype=tl.uint16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return packed.to(tl.uint16) << shift


@triton.jit
def mantissa(packed, MASK: tl.constexpr, ASM: tl.constexpr):
    """1 + (packed & MASK) / 1024 in fp16: the code stays where it is, under the exponent of 1."""
    if ASM:  # one instruction for two codes
        both: tl.constexpr = MASK * 65537
        return tl.inline_asm_elementwise(
            f"lop3.b32 $0, $1, {both}, 0x3c003c00, 0xea;", "=r,r",
            [packed], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return ((packed & MASK) | 0x3C00).to(tl.float16, bitcast=True)


@triton.jit
def query_plane(
    q, G, factor, D: tl.constexpr, GP: tl.constexpr, PLANE: tl.constexpr, W: tl.constexpr
):
    """Channels `PLANE * W` on of the queries `[W, GP]` in fp16, times `factor`."""
    g = tl.arange(0, GP)
    w = PLANE * W + tl.arange(0, W)
    found = tl.load(q + g[None, :] * D + w[:, None], mask=(g < G)[None, :], other=0.0)
    return (found.to(tl.float32) * factor).to(tl.float16)
