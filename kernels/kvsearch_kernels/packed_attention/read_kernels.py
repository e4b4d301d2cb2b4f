# mypy: ignore-errors
"""How `decode_step` reads packed rows: as values, or as tensor-core operands in registers.

For affine formats with one scale a token that needs one AND per pair of channels: a code left in
place, with nothing else in its 16 bits, is the subnormal number code * 2**(place - 24) in fp16. It
is exact, and the power of two leaves outside the loop. NVIDIA's tensor cores take subnormal numbers
as they are (Fasi et al., PeerJ Computer Science 7:e330); on a device that flushes them to zero, the
probe of `decode_step` fails and `auto` does not use these kernels.
"""

import triton
import triton.language as tl

from kvsearch_kernels.packed_attention.lookup_kernels import scale_of
from kvsearch_kernels.quantize_kv.triton_kernels import read_codes


@triton.constexpr_function
def bits_of(BITS, HOW):
    """Bits of a code as products see it: where levels are looked up, HOW 2, all take a nibble."""
    return 4 if HOW == 2 else BITS


@triton.constexpr_function
def stages_of(STAGES, BN, D, KB, KF, VB, VF):
    """Stages of the loop over a part: with three, a tile is loaded while one is attended to.

    With two, loads are waited for as soon as they are asked for, and only other programs hide that.
    So it is where tiles are so large that a third stage would keep other programs away, and where
    the compiler loads single bytes.
    """
    staged = 0  # bytes of a slot in shared memory
    for bits, how in ((KB, KF), (VB, VF)):
        if bits < 16 and not how:
            return min(STAGES, 2)
        staged += 2 * D if bits == 16 else D // 2 if bits in (1, 2, 4) else D
    return STAGES if BN * staged <= 24576 else min(STAGES, 2)


@triton.jit
def values_of(
    held, scales, levels, row, inside, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, kind: tl.constexpr, lead=0,
):  # fmt: skip
    """Rows `[BN, D]` of any format as values of type `kind`; rows not `inside` hold anything.

    A negative group is one of tokens, which share scales of each channel; the first lacks `lead`.
    """
    d = tl.arange(0, D)[None, :]
    r = row[:, None]
    there = inside[:, None]
    if BITS == 16:
        return tl.load(held + r * D + d).to(kind)
    else:
        codes = read_codes(held + r * (D * BITS // 8), d, there, D, BITS)
        if GROUP < 0:
            group = (lead + r) // -GROUP * D + d
        else:
            group = r * (D // GROUP) + d // GROUP
        if LLOYD:
            step = tl.load(scales + group, mask=there, other=0.0)
            # `levels` holds the tables of 1 to 5 and of 8 bits, one after the other
            table = levels + ((1 << BITS) - 2 if BITS < 8 else 62)
            return (tl.load(table + codes) * step.to(tl.float32)).to(kind)
        else:
            at = scales + group * 2
            step = tl.load(at, mask=there, other=0.0).to(tl.float32)
            zero = tl.load(at + 1, mask=there, other=0.0).to(tl.float32)
            return (codes.to(tl.float32) * step + zero).to(kind)


@triton.jit
def steps_of(scales, row, GROUPS: tl.constexpr):
    """Steps `[BN]` fp16 of all `GROUPS` of rows.

    Triton loads what has 4 bytes or more into shared memory while another tile is attended to. Two
    bytes it does not: so steps without a zero are asked for a tile ahead, and stay in registers.
    """
    steps = ()
    for j in tl.static_range(GROUPS):
        steps = steps + (tl.load(scales + row * GROUPS + j),)  # noqa: RUF005
    return steps


@triton.jit
def affine(
    scales, steps, row, BITS: tl.constexpr, LLOYD: tl.constexpr, GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Step, zero and size of a step `[BN]` fp32, as products with codes or levels need them.

    They are those of group number `GROUP`, which `steps` may hold already, see `steps_of`. The size
    is 1024 * (log2(step) + 15), at most 0.1 too low in the logarithm: the bits of an fp16 number
    are its logarithm, but for the mantissa, which they take to be linear. For a step of 0 the
    logarithm is -15, or -47 where it has a sign.
    """
    if LLOYD:
        if len(steps) > 0:
            s = steps[GROUP]
        else:
            s = tl.load(scales + row * GROUPS + GROUP)
        size = s.to(tl.int16, bitcast=True).to(tl.float32)
        s = s.to(tl.float32)
        if BITS == 1:
            return s * 1.5958, s * -0.7979, size + 690.0
        elif BITS == 2:
            scale: tl.constexpr = scale_of(BITS, LLOYD)
            return s * (1.0 / scale), s, size - 318.0
        elif BITS < 8:
            return s, s, size  # levels as they are: there is no zero
        else:
            return s * (8.4 / 255), s * -4.2, size - 5043.0
    else:
        # step and zero are neighbours: one load
        at = scales.to(tl.pointer_type(tl.uint32)) + row * GROUPS + GROUP
        both = tl.load(at)
        low = (both & 0xFFFF).to(tl.uint16)
        step = low.to(tl.float16, bitcast=True).to(tl.float32)
        zero = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return step, zero, low.to(tl.int16, bitcast=True).to(tl.float32)


@triton.jit
def words(held, row, D: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, TURNED: tl.constexpr):
    """Packed rows as uint16 `[BN, W]`, two bytes in each; TURNED, `[W, BN]`.

    Like 16-bit numbers these reach the product without a detour, values as turned pointers: what
    `tl.trans` turned after it was loaded would go through shared memory a second time. Word w holds
    bytes `2 * (w % S)` and the next, of the `2 * S` bytes of a row: S is W, or less where a row has
    too few bytes for a tile; then words are read several times, each time for other channels. The
    lower byte is used in place, see `upper`.
    """
    S: tl.constexpr = D * BITS // 16
    w = tl.arange(0, W)
    at = held.to(tl.pointer_type(tl.uint16))
    if TURNED:
        return tl.load(at + row[None, :] * S + (w % S)[:, None])
    else:
        return tl.load(at + row[:, None] * S + (w % S)[None, :])


@triton.jit
def upper(packed, ASM: tl.constexpr):
    """The upper bytes of `words`, where `mantissa` looks for them."""
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4341;", "=r,r", [packed], dtype=tl.uint16, is_pure=True, pack=2
        )
    else:
        return packed >> 8


@triton.jit
def first_bits(levels, S: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr):
    """Lowest bit `[W]` of the code that word w of plane 0 looks for, as a number.

    Read from memory, behind the levels: a number that depends on w but is computed in the kernel
    would keep Triton from loading packed words straight into the layout of the product.
    """
    return tl.load(levels + 318 + tl.arange(0, W) // S * BITS).to(tl.uint32)


@triton.jit
def mantissa(
    packed, firsts, S: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr,
    ASM: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """code * 2**(place - 24) in fp16, from `words` that hold 2 * S different bytes.

    The code of word w is number `w // S + PLANE * W / S` of its byte. It stays where it is, under
    the exponent of the subnormal numbers. Where words look for different codes in the same bytes,
    their masks differ, see `first_bits`; they do not change in the loop, so that costs nothing
    there.
    """
    MASK: tl.constexpr = ((1 << BITS) - 1) << (PLANE * (W // S) * BITS)
    if W == S:
        if ASM:  # one instruction for two codes
            both: tl.constexpr = MASK * 65537
            return tl.inline_asm_elementwise(
                f"and.b32 $0, $1, {both};", "=r,r",
                [packed], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return (packed & MASK).to(tl.float16, bitcast=True)
    else:
        masks = (firsts * MASK).to(tl.uint16)
        masks = masks[:, None] if TURNED else masks[None, :]
        if ASM:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $1, $2;", "=r,r,r",
                [packed, tl.broadcast_to(masks, packed.shape)], dtype=tl.float16, is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            return (packed & masks).to(tl.float16, bitcast=True)


@triton.jit
def place_of(S: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr):
    """`2**place` `[W]` fp32 of the codes that `mantissa` takes."""
    within = (tl.arange(0, W) // S * BITS).to(tl.float32)
    return tl.exp2(within) * 2.0 ** (PLANE * (W // S) * BITS)


@triton.jit
def channels_of(S: tl.constexpr, W: tl.constexpr, PLANE: tl.constexpr, HALF: tl.constexpr):
    """Channels `[W]` that `mantissa` takes from the lower (HALF 0) or upper bytes of `words`."""
    w = tl.arange(0, W)
    return (w // S + PLANE * (W // S)) * (2 * S) + 2 * (w % S) + HALF


@triton.jit
def query_plane(
    q, G, factor, D: tl.constexpr, GP: tl.constexpr, S: tl.constexpr, W: tl.constexpr,
    PLANE: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Queries `[W, GP]` in fp16, times `factor` `[W]`: what meets a plane of keys.

    Channels are those that `mantissa` takes from the lower (HALF 0) or upper bytes of `words`;
    those outside of group number `OWN` are 0.
    """
    g = tl.arange(0, GP)
    channel = channels_of(S, W, PLANE, HALF)
    inside = (g < G)[None, :] & (channel // GROUP == OWN)[:, None]
    found = tl.load(q + g[None, :] * D + channel[:, None], mask=inside, other=0.0)
    scaled = found.to(tl.float32) * factor[:, None]
    return scaled.to(tl.float16)
