# mypy: ignore-errors
# ruff: noqa: RUF005
"""Lloyd levels of 4 and 5 bits as tensor-core operands: a byte permute looks up four codes at once.

Levels are symmetric, so a code is a sign and a size, and `prmt` picks four bytes among eight: once
for the lower and once for the upper bytes of eight sizes in fp16. Nothing is rounded but the
levels, to fp16, as values in 16 bits are. `prmt` also spreads the top bit of a nibble over a byte:
that selects between two tables of eight sizes, and puts signs into upper bytes before bytes are
joined. Keys cost 18 instructions for eight codes, 31 at 5 bits, values 17.

A word of asm is 32 bits with eight codes, numbered from the lowest. There is no asm in Triton's
interpreter: `level_of` replaces it there, and `tests/kernels/test_lookups.py` carries it out.
"""

import triton
import triton.language as tl

from kvsearch_kernels.decode_attention import lookup_asm

KEYS_4 = tl.constexpr(lookup_asm.KEYS_4)
KEYS_5 = tl.constexpr(lookup_asm.KEYS_5)
VALUES_LOW = tl.constexpr(lookup_asm.VALUES_LOW)
VALUES_HIGH = tl.constexpr(lookup_asm.VALUES_HIGH)


@triton.jit
def sizes_of(levels, BITS: tl.constexpr, ASM: tl.constexpr):
    """`lookup_asm.tables`, words `[1, 1]`, read from one of two copies in memory behind the levels.

    Constants, or words that are the same in all threads, would lie in uniform registers and be
    copied to others at every use; so threads take turns in which copy they read. The shape is there
    because with scalars Triton moves levels, not words, into the layout of the product.
    """
    at = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :] + (326 if BITS == 4 else 330)
    if ASM:
        at = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 1; mad.lo.s32 $0, t, 12, $1; }",
            "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    words = levels.to(tl.pointer_type(tl.int32)) + at
    found = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    if BITS == 4:
        return found
    else:
        return found + (
            tl.load(words + 4), tl.load(words + 5), tl.load(words + 6), tl.load(words + 7)
        )  # fmt: skip


@triton.jit
def level_of(codes, levels, BITS: tl.constexpr):
    """Levels in fp16 of codes; what asm is replaced by where there is none."""
    return tl.load(levels + ((1 << BITS) - 2) + codes.to(tl.int32)).to(tl.float16)


@triton.jit
def top_words(held, row, D: tl.constexpr):
    """Words of two bytes that hold the top bits of 5-bit keys, `[BN, D / 4]`, as `words` does.

    The top bit of the code in nibble n of word w is bit `4 * n + first` of its word here, see
    `top_shifts`: channels a quarter of D apart are half a byte apart in either plane.
    """
    w = tl.arange(0, D // 4)
    at = held.to(tl.pointer_type(tl.uint16)) + D // 4 + row[:, None] * (D * 5 // 16)
    return tl.load(at + (w % (D // 16))[None, :])


@triton.jit
def top_shifts(levels, D: tl.constexpr):
    """`first` of `top_words`, `[D / 4]`; from powers of two in memory, as `first_bits`."""
    power = tl.load(levels + 318 + tl.arange(0, D // 4) // (D // 16))
    return (power.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def key_levels(packed, top, shifts, sizes, levels, BITS: tl.constexpr, ASM: tl.constexpr):
    """Levels of words `[BN, W]`, of 4 bits a code: four times `[BN, W]` fp16, lowest nibble first.

    At 5 bits those are the lower ones, and `top` and `shifts` say where the others are.
    """
    if ASM:
        if BITS == 4:
            return tl.inline_asm_elementwise(
                KEYS_4, "=r,=r,=r,=r" + ",r" * 9,
                [packed, sizes[0], sizes[1], sizes[2], sizes[3]],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            shift = tl.broadcast_to(shifts[None, :], top.shape)
            return tl.inline_asm_elementwise(
                KEYS_5, "=r,=r,=r,=r" + ",r" * 20,
                [packed, top, shift, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                 sizes[6], sizes[7]],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        if BITS == 4:
            upper = tl.zeros_like(packed)
        else:
            upper = top >> shifts[None, :].to(tl.uint16)
        return (
            level_of((packed & 15) | (upper & 1) << 4, levels, BITS),
            level_of((packed >> 4 & 15) | (upper >> 4 & 1) << 4, levels, BITS),
            level_of((packed >> 8 & 15) | (upper >> 8 & 1) << 4, levels, BITS),
            level_of((packed >> 12 & 15) | (upper >> 12 & 1) << 4, levels, BITS),
        )


@triton.jit
def value_levels(held, row, sizes, levels, D: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr):
    """Levels of rows of 4 bits: planes of 64 channels at least, `[BN, max(64, D / 2)]` fp16.

    Looked up where bytes are loaded, not in the layout of the product, which values reach through
    shared memory: there every byte would be alone in 16 bits, and half of every `prmt` idle.
    """
    S: tl.constexpr = D // 2
    w = tl.arange(0, S)
    packed = tl.load(held + row[:, None] * S + w[None, :])
    if ASM:
        # no instruction: the second operand keeps Triton from moving bytes, see `spread`
        nothing = tl.broadcast_to((w // S)[None, :].to(tl.uint8), packed.shape)
        packed = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [packed, nothing], dtype=tl.uint8, is_pure=True, pack=4
        )
        # what both have in common is done once
        low = tl.inline_asm_elementwise(
            VALUES_LOW, "=r,=r" + ",r" * 17, [packed, sizes[0], sizes[1], sizes[2], sizes[3]],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            VALUES_HIGH, "=r,=r" + ",r" * 17, [packed, sizes[0], sizes[1], sizes[2], sizes[3]],
            dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        low = level_of(packed & 15, levels, 4)
        high = level_of(packed >> 4, levels, 4)
    if S < 64:
        return (tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [BN, D]),)
    else:
        return low, high
