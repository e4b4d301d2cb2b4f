# mypy: ignore-errors
# ruff: noqa: RUF005
"""Levels as tensor-core operands: a byte permute looks up four codes at once.

`prmt` picks four bytes among eight: once for the lower and once for the upper bytes of levels in
fp16. Nothing is rounded but the levels, as values in 16 bits are. Eight entries are all levels of 2
and 3 bits, and the sizes of 4 bits, whose levels are symmetric; the sizes of 5 bits are two tables.
`prmt` also spreads the top bit of a nibble over a byte, which selects a table and puts signs into
upper bytes before bytes are joined. At 2, 3, 4 and 5 bits eight codes take 10, 14, 18 and 31
instructions. At 2 bits levels are scaled so that all have the same lower byte, see
`lookup_asm.SCALE`, and only upper bytes are looked up. Evenly spaced levels of 3 bits are looked up
too, as the codes themselves, for two instructions less; in other widths they take one AND, see
`mantissa`.

Codes are looked up a nibble each. Those of 2 bits, and the lower ones of 3, are two to a nibble: a
word is read twice, and shifted the second time. There is no asm in Triton's interpreter: `level_of`
replaces it there, and `tests/kernels/test_lookups.py` carries the asm out.
"""

import triton
import triton.language as tl

from kvsearch_kernels.packed_attention import lookup_asm

EVEN = 6  # evenly spaced levels of 3 bits, behind Lloyd levels of 2 to 5
ASM_OF = {
    kind: lookup_asm.lookups(bits, lloyd)
    for kind, bits, lloyd in ((2, 2, True), (3, 3, True), (4, 4, True), (5, 5, True), (6, 3, False))
}


@triton.constexpr_function
def asm_of(BITS, LLOYD, WHICH):
    """Text 0, or constraints 1."""
    return ASM_OF[BITS if LLOYD else EVEN][WHICH]


@triton.constexpr_function
def tables_at(BITS, LLOYD):
    """Where the tables of a kind start in a copy."""
    return (0, 1, 5, 9, 17)[(BITS if LLOYD else EVEN) - 2]


@triton.constexpr_function
def tables_end(BITS, LLOYD):
    """Where they end."""
    return (1, 5, 9, 17, 19)[(BITS if LLOYD else EVEN) - 2]


@triton.constexpr_function
def scale_of(BITS, LLOYD):
    """What levels are multiplied by when they are looked up; steps are divided by it."""
    return lookup_asm.SCALE if BITS == 2 and LLOYD else 1.0


@triton.jit
def tables_of(levels, BITS: tl.constexpr, LLOYD: tl.constexpr, ASM: tl.constexpr):
    """`lookup_asm.tables`, words `[1, 1]`, read from one of two copies in memory behind the levels.

    Constants, or words that are the same in all threads, would lie in uniform registers and be
    copied to others at every use; so threads take turns in which copy they read. The shape is there
    because with scalars Triton moves levels, not words, into the layout of the product.
    """
    at = tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :] + 326
    if ASM:
        at = tl.inline_asm_elementwise(
            "{ .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 1; mad.lo.s32 $0, t, 19, $1; }",
            "=r,r", [at], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    words = levels.to(tl.pointer_type(tl.int32)) + at + tables_at(BITS, LLOYD)
    found = ()
    for i in tl.static_range(tables_end(BITS, LLOYD) - tables_at(BITS, LLOYD)):
        found = found + (tl.load(words + i),)
    return found


@triton.jit
def shifts_of(levels, BITS: tl.constexpr, W: tl.constexpr):
    """How far words `[W]` of codes and of top bits are shifted, see `lookup_words`.

    From powers of two in memory, as `first_bits`; what a width does not need is left out. Top bits
    of 3 bits are turned by two places less, to where they belong in a nibble, or by 30 more.
    """
    w = tl.arange(0, W)
    found = ()
    if BITS < 4:
        power = tl.load(levels + 318 + w // (W // 2) * 2)
        found = found + ((power.to(tl.int32, bitcast=True) >> 23) - 127,)
    if BITS == 3 or BITS == 5:
        power = tl.load(levels + 318 + w // (W // 4))
        found = found + ((power.to(tl.int32, bitcast=True) >> 23) - (97 if BITS == 3 else 127),)
    return found


@triton.jit
def across(x, ROWS: tl.constexpr):
    """As rows, or as columns."""
    return x[:, None] if ROWS else x[None, :]


@triton.jit
def lookup_words(held, row, W: tl.constexpr, BITS: tl.constexpr, TURNED: tl.constexpr):
    """Words `[BN, W]` uint16 that hold a code a nibble once shifted; TURNED, `[W, BN]`.

    A row holds `W * BITS / 4` words. Half a row of codes lies between the codes of a nibble and of
    the one above, a quarter between those of 2 bits, an eighth between top bits: so words and top
    bits are read as often as they have codes for a nibble, and shifted to the next each time.
    """
    w = tl.arange(0, W)
    S: tl.constexpr = W if BITS > 3 else W // 2
    at = held + across(row, 1 - TURNED) * (W * BITS // 4)
    codes = tl.load(at + across(w % S, TURNED))
    if BITS == 3 or BITS == 5:
        return codes, tl.load(at + S + across(w % (W // 4), TURNED))
    else:
        return (codes,)


@triton.jit
def level_of(
    words, shifts, levels, BITS: tl.constexpr, LLOYD: tl.constexpr, NIBBLE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Levels in fp16 of the codes in a nibble of `lookup_words`; what there is without asm."""
    codes = words[0].to(tl.int32)
    if BITS < 4:
        codes = codes >> across(shifts[0], TURNED) + 4 * NIBBLE & 3
    else:
        codes = codes >> 4 * NIBBLE & 15
    if BITS == 3 or BITS == 5:
        first = shifts[-1] - (30 if BITS == 3 else 0)
        top = words[1].to(tl.int32) >> across(first, TURNED) + 4 * NIBBLE & 1
        codes = codes | top << BITS - 1
    if LLOYD:
        level = tl.load(levels + ((1 << BITS) - 2) + codes)
        return (level * scale_of(BITS, LLOYD)).to(tl.float16)
    else:
        return codes.to(tl.float16)


@triton.jit
def operands_of(words, shifts, tables, BITS: tl.constexpr, TURNED: tl.constexpr):
    """What the asm takes, in its order."""
    found = (words[0],)
    if BITS < 4:
        found = found + (tl.broadcast_to(across(shifts[0], TURNED), words[0].shape),)
    if BITS == 3 or BITS == 5:
        found = found + (words[1], tl.broadcast_to(across(shifts[-1], TURNED), words[0].shape))
    return found + tables


@triton.jit
def levels_at(
    held, row, shifts, tables, levels, D: tl.constexpr, BITS: tl.constexpr, LLOYD: tl.constexpr,
    ASM: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Levels of rows, four times `[BN, D / 4]` fp16, by nibbles of words of two bytes.

    Nibble n of word w is channel `2 * w + n // 2`, and half of D more where n is odd. TURNED, rows
    are columns, as products take values.
    """
    at = held.to(tl.pointer_type(tl.uint16))
    words = lookup_words(at, row, D // 4, BITS, TURNED)
    if ASM:
        return tl.inline_asm_elementwise(
            asm_of(BITS, LLOYD, 0), asm_of(BITS, LLOYD, 1),
            operands_of(words, shifts, tables, BITS, TURNED),
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            level_of(words, shifts, levels, BITS, LLOYD, 0, TURNED),
            level_of(words, shifts, levels, BITS, LLOYD, 1, TURNED),
            level_of(words, shifts, levels, BITS, LLOYD, 2, TURNED),
            level_of(words, shifts, levels, BITS, LLOYD, 3, TURNED),
        )
