# mypy: ignore-errors
# ruff: noqa: E501, RUF005, SIM102
"""Kernels of `decode_attention`: one launch over all splits of all parts, and one that joins them.

Packed keys and values become tensor-core operands in registers. For affine formats with one scale
a token that needs one AND-OR per pair of channels: the code, left in place inside the mantissa of
1.0, is 1 + code * 2**(place - 10); the 1 and the power of two leave through sums outside the loop.
"""

import triton
import triton.language as tl

from kvsearch_kernels.lifetime_attention.triton_kernels import soften
from kvsearch_kernels.quantize_kv.triton_kernels import hadamard, read_codes


@triton.jit
def _values(
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
def _affine(
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
def _spread(
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
def _mantissa(packed, MASK: tl.constexpr, ASM: tl.constexpr):
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
def _query_plane(
    q, G, factor, D: tl.constexpr, GP: tl.constexpr, PLANE: tl.constexpr, W: tl.constexpr
):
    """Channels `PLANE * W` on of the queries `[W, GP]` in fp16, times `factor`."""
    g = tl.arange(0, GP)
    w = PLANE * W + tl.arange(0, W)
    found = tl.load(q + g[None, :] * D + w[:, None], mask=(g < G)[None, :], other=0.0)
    return (found.to(tl.float32) * factor).to(tl.float16)


@triton.jit
def _part(
    q, k, ks, v, vs, lengths, levels, capacity, split, splits, bh, G, scale, cap,
    D: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    KB: tl.constexpr, KG: tl.constexpr, KL: tl.constexpr, KF: tl.constexpr,
    VB: tl.constexpr, VG: tl.constexpr, VL: tl.constexpr, VF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend to split `split` of one part.

    Keys are the rows of the scores `[BN, GP]` and channels those of the output: the few heads of a
    group are padded to 8 that way, not to 16. KF and VF say whether keys and values take the
    mantissa path. Returns planes of the output `[D / planes, GP]`, the sum and the maximum `[GP]`,
    of weights in bits.
    """
    kind: tl.constexpr = q.dtype.element_ty
    length = tl.load(lengths + bh)
    share = tl.cdiv(tl.cdiv(length, BN), splits) * BN
    begin = split * share
    end = tl.minimum(begin + share, length)
    k += bh.to(tl.int64) * capacity * (D * KB // 8 if KB < 16 else D)
    v += bh.to(tl.int64) * capacity * (D * VB // 8 if VB < 16 else D)
    ks += bh.to(tl.int64) * capacity * (D // KG * (1 if KL else 2))
    vs += bh.to(tl.int64) * capacity * (D // VG * (1 if VL else 2))
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    n = tl.arange(0, BN)
    q += bh.to(tl.int64) * G * D
    qt = tl.load(q + g[None, :] * D + d[:, None], mask=(g < G)[None, :], other=0.0)

    KW: tl.constexpr = max(32, D * KB // 8) if KF else D
    KP: tl.constexpr = D // KW
    KS: tl.constexpr = KW * 8 // D  # bits between planes
    # lowest bit of a code; where words are shifted anyway, as high as the mantissa's 10 bits allow
    KU: tl.constexpr = 10 - 8 + (KW * 8 // D - KB) if KW * 8 > D * KB else 0
    bits_scale = scale * 1.4426950408889634
    KN: tl.constexpr = D // KG if KF else 1  # groups, each of whole planes
    ones = ()
    q_sums = ()
    if KF:
        for j in tl.static_range(KN):
            once = tl.zeros([GP], tl.float32)
            whole = tl.zeros([GP], tl.float32)
            for i in tl.static_range(j * KP // KN, (j + 1) * KP // KN):
                rounded = _query_plane(q, G, bits_scale * 2.0 ** (-i * KS), D, GP, i, KW)
                part = tl.sum(rounded.to(tl.float32), 0)
                whole += part * 2.0 ** (i * KS)
                once += part
            ones = ones + (once,)
            q_sums = q_sums + (whole,)

    # 64 channels at least: the smallest tile that four warps share without repeating work
    VW: tl.constexpr = max(64, D * VB // 8) if VF else D
    VP: tl.constexpr = D // VW
    VS: tl.constexpr = VW * 8 // D
    VU: tl.constexpr = 10 - 8 + (VW * 8 // D - VB) if VW * 8 > D * VB else 0
    acc = ()
    for _ in tl.static_range(VP):
        acc = acc + (tl.zeros([VW, GP], tl.float32),)
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([BN, GP], tl.float32)
    VN: tl.constexpr = D // VG if VF else 1
    zeros = ()
    weights = ()
    for _ in tl.static_range(VN):
        zeros = zeros + (tl.zeros([BN, GP], tl.float32),)
        weights = weights + (tl.zeros([BN, GP], tl.float32),)
    for start in range(begin, end, BN):
        row = (start + n).to(tl.int64)
        inside = start + n < end
        if KF:
            packed = _spread(k, row, inside, D, KB, KW, KU, ASM)
            s = tl.zeros([BN, GP], tl.float32)
            for j in tl.static_range(KN):
                dots = tl.zeros([BN, GP], tl.float32)
                for i in tl.static_range(j * KP // KN, (j + 1) * KP // KN):
                    keys = _mantissa(packed, ((1 << KB) - 1) << (KU + i * KS), ASM)
                    # the same for every turn of the loop: the compiler lifts it out
                    q_i = _query_plane(q, G, bits_scale * 2.0 ** (-i * KS), D, GP, i, KW)
                    dots = tl.dot(keys, q_i, dots)
                step, zero = _affine(ks, row, inside, KB, KL, KN, j)
                step = step * (1024.0 / 2**KU)
                s += (dots - ones[j][None, :]) * step[:, None] + q_sums[j][None, :] * zero[:, None]
            if HAS_CAP:
                s = soften(s * 0.6931471805599453, 1.0, cap, True)
        else:
            keys = _values(k, ks, levels, row, inside, D, KB, KG, KL, kind)
            s = soften(tl.dot(keys, qt, input_precision="ieee"), scale, cap, HAS_CAP)
        s = tl.where(inside[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 0))
        p = tl.exp2(s - higher[None, :])
        shrink = tl.exp2(top - higher)
        total = total * shrink[None, :] + p
        top = higher
        if VF:
            packed = _spread(v, row, inside, D, VB, VW, VU, ASM)
            new = ()
            new_zeros = ()
            new_weights = ()
            for j in tl.static_range(VN):
                step, zero = _affine(vs, row, inside, VB, VL, VN, j)
                w = (p * step[:, None]).to(tl.float16)
                # as rounded: the ones cancel
                new_weights = new_weights + (weights[j] * shrink[None, :] + w.to(tl.float32),)
                new_zeros = new_zeros + (zeros[j] * shrink[None, :] + p * zero[:, None],)
                for i in tl.static_range(j * VP // VN, (j + 1) * VP // VN):
                    values = _mantissa(packed, ((1 << VB) - 1) << (VU + i * VS), ASM)
                    new = new + (tl.dot(tl.trans(values), w, acc[i] * shrink[None, :]),)
            acc = new
            zeros = new_zeros
            weights = new_weights
        else:
            values = tl.trans(_values(v, vs, levels, row, inside, D, VB, VG, VL, kind))
            acc = (tl.dot(values, p.to(kind), acc[0] * shrink[None, :], input_precision="ieee"),)
    if VF:
        new = ()
        for i in tl.static_range(VP):
            ones_in = tl.sum(weights[i * VN // VP], 0)
            plane = (acc[i] - ones_in[None, :]) * (1024.0 / 2**VU * 2.0 ** (-i * VS))
            new = new + (plane + tl.sum(zeros[i * VN // VP], 0)[None, :],)
        acc = new
    return acc, tl.sum(total, 0), top


@triton.jit
def _store(
    acc, total, top, partial, bits, at, G, D: tl.constexpr, GP: tl.constexpr, PLANES: tl.constexpr
):
    """Write one split: normalised output and log2-sum-exp2."""
    g = tl.arange(0, GP)
    w = tl.arange(0, D // PLANES)
    heads = g < G
    some = total > 0
    safe = tl.where(some, total, 1.0)
    tl.store(bits + at * G + g, tl.where(some, top + tl.log2(safe), float("-inf")), mask=heads)
    for i in tl.static_range(PLANES):
        to = partial + (at * G + g)[None, :] * D + i * (D // PLANES) + w[:, None]
        tl.store(to, acc[i] / safe[None, :], mask=heads[None, :])


@triton.jit(do_not_specialize=["c0", "s0", "c1", "s1", "c2", "s2", "c3", "s3", "G", "splits"])
def decode(
    q0, k0, ks0, v0, vs0, n0, c0, s0, q1, k1, ks1, v1, vs1, n1, c1, s1,
    q2, k2, ks2, v2, vs2, n2, c2, s2, q3, k3, ks3, v3, vs3, n3, c3, s3,
    partial, bits, levels, G, splits, scale, cap,
    D: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
    KB0: tl.constexpr, KG0: tl.constexpr, KL0: tl.constexpr, KF0: tl.constexpr,
    VB0: tl.constexpr, VG0: tl.constexpr, VL0: tl.constexpr, VF0: tl.constexpr,
    KB1: tl.constexpr, KG1: tl.constexpr, KL1: tl.constexpr, KF1: tl.constexpr,
    VB1: tl.constexpr, VG1: tl.constexpr, VL1: tl.constexpr, VF1: tl.constexpr,
    KB2: tl.constexpr, KG2: tl.constexpr, KL2: tl.constexpr, KF2: tl.constexpr,
    VB2: tl.constexpr, VG2: tl.constexpr, VL2: tl.constexpr, VF2: tl.constexpr,
    KB3: tl.constexpr, KG3: tl.constexpr, KL3: tl.constexpr, KF3: tl.constexpr,
    VB3: tl.constexpr, VG3: tl.constexpr, VL3: tl.constexpr, VF3: tl.constexpr,
):  # fmt: skip
    """One program: one split of one part of one KV head, for all its query heads.

    Part i has `s_i` splits, pools of capacity `c_i`, lengths `n_i` `[B * H]` on the device, and
    its own `q_i`, rotated where its keys are.
    """
    split = tl.program_id(0)
    bh = tl.program_id(1)
    at = bh.to(tl.int64) * splits + split
    if split < s0:
        acc, total, top = _part(
            q0, k0, ks0, v0, vs0, n0, levels, c0, split, s0, bh, G, scale, cap, D, GP,
            BN if KF0 and VF0 else BN // 2, HAS_CAP, KB0, KG0, KL0, KF0, VB0, VG0, VL0, VF0, ASM,
        )  # fmt: skip
        _store(
            acc, total, top, partial, bits, at, G, D, GP, D // max(64, D * VB0 // 8) if VF0 else 1
        )
    if PARTS > 1:
        if (split >= s0) & (split < s0 + s1):
            acc, total, top = _part(
                q1, k1, ks1, v1, vs1, n1, levels, c1, split - s0, s1, bh, G, scale, cap, D, GP,
                BN if KF1 and VF1 else BN // 2, HAS_CAP, KB1, KG1, KL1, KF1, VB1, VG1, VL1, VF1, ASM,
            )  # fmt: skip
            _store(
                acc,
                total,
                top,
                partial,
                bits,
                at,
                G,
                D,
                GP,
                D // max(64, D * VB1 // 8) if VF1 else 1,
            )
    if PARTS > 2:
        if (split >= s0 + s1) & (split < s0 + s1 + s2):
            acc, total, top = _part(
                q2, k2, ks2, v2, vs2, n2, levels, c2, split - s0 - s1, s2, bh, G, scale, cap, D,
                GP, BN if KF2 and VF2 else BN // 2, HAS_CAP, KB2, KG2, KL2, KF2, VB2, VG2, VL2, VF2, ASM,
            )  # fmt: skip
            _store(
                acc,
                total,
                top,
                partial,
                bits,
                at,
                G,
                D,
                GP,
                D // max(64, D * VB2 // 8) if VF2 else 1,
            )
    if PARTS > 3:
        if split >= s0 + s1 + s2:
            acc, total, top = _part(
                q3, k3, ks3, v3, vs3, n3, levels, c3, split - s0 - s1 - s2, s3, bh, G, scale, cap,
                D, GP, BN if KF3 and VF3 else BN // 2, HAS_CAP, KB3, KG3, KL3, KF3, VB3, VG3, VL3, VF3, ASM,
            )  # fmt: skip
            _store(
                acc,
                total,
                top,
                partial,
                bits,
                at,
                G,
                D,
                GP,
                D // max(64, D * VB3 // 8) if VF3 else 1,
            )


@triton.jit(do_not_specialize=["G", "splits"])
def combine(
    partial, bits, out, lse, turned, G, splits,
    D: tl.constexpr, SP: tl.constexpr, ROTATED: tl.constexpr, STEPS: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One program: one query head. `turned` `[splits]` says whose values are rotated."""
    bh = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    every = tl.arange(0, SP)
    d = tl.arange(0, D)
    c = tl.arange(0, 16)
    first = bh * splits
    b = tl.load(bits + (first + every) * G + g, mask=every < splits, other=float("-inf"))
    top = tl.max(b, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(b - base), 0)
    safe = tl.where(total > 0, total, 1.0)
    plain = tl.zeros([16, D], tl.float32)
    spun = tl.zeros([16, D], tl.float32)
    for start in range(0, splits, 16):
        i = start + c
        there = i < splits
        at = (first + i) * G + g
        w = tl.exp2(tl.load(bits + at, mask=there, other=float("-inf")) - base) / safe
        rows = tl.load(partial + at[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        rows = rows * w[:, None]
        if ROTATED:
            spin = tl.load(turned + i, mask=there, other=0) != 0
            spun += tl.where(spin[:, None], rows, 0.0)
            rows = tl.where(spin[:, None], 0.0, rows)
        plain += rows
    result = tl.sum(plain, 0)
    if ROTATED:  # rotating is linear: once for the sum of all splits
        back = hadamard(tl.sum(spun, 0)[None, :], 1, D, STEPS, NORM)
        result += tl.sum(back, 0)
    tl.store(out + (bh * G + g) * D + d, result.to(out.dtype.element_ty))
    bits_all = tl.where(total > 0, base + tl.log2(safe), float("-inf"))
    tl.store(lse + bh * G + g, bits_all * 0.6931471805599453)
