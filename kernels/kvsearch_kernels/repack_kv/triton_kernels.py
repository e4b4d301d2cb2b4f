# mypy: ignore-errors
# ruff: noqa: E501
"""Kernel of `repack_kv`."""

import triton
import triton.language as tl

from kvsearch_kernels.decode_attention.read_kernels import values_of
from kvsearch_kernels.quantize_kv.triton_kernels import hadamard, write_codes


@triton.jit
def _take(
    values, held, scales, levels, like, at, start, count, inside, D: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, LLOYD: tl.constexpr, ROTATED: tl.constexpr,
    BT: tl.constexpr, STEPS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """`values` with those of the slots that are in this part, rounded to the type of `like`."""
    here = inside & (at >= start) & (at < start + count)
    row = tl.where(here, at - start, 0)
    x = values_of(held, scales, levels, row, here, D, BITS, GROUP, LLOYD, tl.float32)
    if ROTATED:
        x = hadamard(x, BT, D, STEPS, NORM)
    x = x.to(like.dtype.element_ty).to(tl.float32)
    return tl.where(here[:, None], x, values)


@triton.jit
def _side(
    p0, s0, c0, o0, n0, p1, s1, c1, o1, n1, p2, s2, c2, o2, n2, p3, s3, c3, o3, n3,
    out, out_scales, out_levels, edges, source, levels, like, ssn, bh, n,
    D: tl.constexpr, PARTS: tl.constexpr, OWN: tl.constexpr, BT: tl.constexpr,
    STEPS: tl.constexpr, NORM: tl.constexpr,
    B0: tl.constexpr, G0: tl.constexpr, L0: tl.constexpr, R0: tl.constexpr,
    B1: tl.constexpr, G1: tl.constexpr, L1: tl.constexpr, R1: tl.constexpr,
    B2: tl.constexpr, G2: tl.constexpr, L2: tl.constexpr, R2: tl.constexpr,
    B3: tl.constexpr, G3: tl.constexpr, L3: tl.constexpr, R3: tl.constexpr,
    B: tl.constexpr, G: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """BT slots of the keys, or of the values, of one head."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    inside = t < n
    at = tl.load(source + t * ssn, mask=inside, other=0)
    wide0: tl.constexpr = D * B0 // 8 if B0 < 16 else D
    wide1: tl.constexpr = D * B1 // 8 if B1 < 16 else D
    wide2: tl.constexpr = D * B2 // 8 if B2 < 16 else D
    wide3: tl.constexpr = D * B3 // 8 if B3 < 16 else D
    p0 += bh * c0 * wide0
    p1 += bh * c1 * wide1
    p2 += bh * c2 * wide2
    p3 += bh * c3 * wide3
    s0 += bh * c0 * (D // G0 * (1 if L0 else 2))
    s1 += bh * c1 * (D // G1 * (1 if L1 else 2))
    s2 += bh * c2 * (D // G2 * (1 if L2 else 2))
    s3 += bh * c3 * (D // G3 * (1 if L3 else 2))
    values = tl.zeros([BT, D], tl.float32)
    if OWN != 0:
        values = _take(
            values, p0, s0, levels, like, at, o0, n0, inside, D, B0, G0, L0, R0, BT, STEPS, NORM
        )
    if PARTS > 1 and OWN != 1:
        values = _take(
            values, p1, s1, levels, like, at, o1, n1, inside, D, B1, G1, L1, R1, BT, STEPS, NORM
        )
    if PARTS > 2 and OWN != 2:
        values = _take(
            values, p2, s2, levels, like, at, o2, n2, inside, D, B2, G2, L2, R2, BT, STEPS, NORM
        )
    if PARTS > 3 and OWN != 3:
        values = _take(
            values, p3, s3, levels, like, at, o3, n3, inside, D, B3, G3, L3, R3, BT, STEPS, NORM
        )
    mine = inside & False
    if OWN == 0:
        mine = inside & (at >= o0) & (at < o0 + n0)
        _move(p0, s0, out, out_scales, at - o0, bh * n + t, mine, D, B, G, L)
    if OWN == 1:
        mine = inside & (at >= o1) & (at < o1 + n1)
        _move(p1, s1, out, out_scales, at - o1, bh * n + t, mine, D, B, G, L)
    if OWN == 2:
        mine = inside & (at >= o2) & (at < o2 + n2)
        _move(p2, s2, out, out_scales, at - o2, bh * n + t, mine, D, B, G, L)
    if OWN == 3:
        mine = inside & (at >= o3) & (at < o3 + n3)
        _move(p3, s3, out, out_scales, at - o3, bh * n + t, mine, D, B, G, L)
    new = inside & (mine == 0)
    if B == 16:
        d = tl.arange(0, D)[None, :]
        tl.store(
            out + (bh * n + t)[:, None] * D + d, values.to(out.dtype.element_ty), mask=new[:, None]
        )
    else:
        write_codes(
            values,
            out,
            out_scales,
            out_levels,
            edges,
            bh * n + t,
            new,
            D,
            G,
            B,
            L,
            R,
            BT,
            STEPS,
            NORM,
        )


@triton.jit
def _move(
    held, scales, out, out_scales, row, to, mine, D: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, LLOYD: tl.constexpr,
):  # fmt: skip
    """Copy rows as they are. Rows of 3 and 5 bits are no power of two wide."""
    wide: tl.constexpr = D * BITS // 8 if BITS < 16 else D
    PAD: tl.constexpr = wide if BITS != 3 and BITS != 5 else (D // 2 if BITS == 3 else D)
    c = tl.arange(0, PAD)[None, :]
    there = mine[:, None] & (c < wide)
    tl.store(out + to[:, None] * wide + c, tl.load(held + row[:, None] * wide + c, mask=there, other=0), mask=there)  # fmt: skip
    if BITS < 16:
        numbers: tl.constexpr = D // GROUP * (1 if LLOYD else 2)
        i = tl.arange(0, numbers)[None, :]
        x = tl.load(scales + row[:, None] * numbers + i, mask=mine[:, None], other=0.0)
        tl.store(out_scales + to[:, None] * numbers + i, x, mask=mine[:, None])


@triton.jit(
    do_not_specialize=[
        "c0",
        "o0",
        "n0",
        "c1",
        "o1",
        "n1",
        "c2",
        "o2",
        "n2",
        "c3",
        "o3",
        "n3",
        "n",
        "H",
        "ssb",
        "ssh",
    ]
)
def repack(
    k0, ks0, v0, vs0, c0, o0, n0, k1, ks1, v1, vs1, c1, o1, n1,
    k2, ks2, v2, vs2, c2, o2, n2, k3, ks3, v3, vs3, c3, o3, n3,
    k, ks, k_levels, k_edges, v, vs, v_levels, v_edges, source, levels, like, ssb, ssh, ssn, n, H,
    D: tl.constexpr, PARTS: tl.constexpr, OWN: tl.constexpr, BT: tl.constexpr,
    STEPS: tl.constexpr, NORM: tl.constexpr,
    KB0: tl.constexpr, KG0: tl.constexpr, KL0: tl.constexpr, KR0: tl.constexpr,
    VB0: tl.constexpr, VG0: tl.constexpr, VL0: tl.constexpr, VR0: tl.constexpr,
    KB1: tl.constexpr, KG1: tl.constexpr, KL1: tl.constexpr, KR1: tl.constexpr,
    VB1: tl.constexpr, VG1: tl.constexpr, VL1: tl.constexpr, VR1: tl.constexpr,
    KB2: tl.constexpr, KG2: tl.constexpr, KL2: tl.constexpr, KR2: tl.constexpr,
    VB2: tl.constexpr, VG2: tl.constexpr, VL2: tl.constexpr, VR2: tl.constexpr,
    KB3: tl.constexpr, KG3: tl.constexpr, KL3: tl.constexpr, KR3: tl.constexpr,
    VB3: tl.constexpr, VG3: tl.constexpr, VL3: tl.constexpr, VR3: tl.constexpr,
    KBT: tl.constexpr, KGT: tl.constexpr, KLT: tl.constexpr, KRT: tl.constexpr,
    VBT: tl.constexpr, VGT: tl.constexpr, VLT: tl.constexpr, VRT: tl.constexpr,
):  # fmt: skip
    """One program: BT slots of one head, keys or values.

    Part i holds `n_i` slots of pools of capacity `c_i`, the first of which is number `o_i` in
    `source`. The results are contiguous; `like` has the type of values in between.
    """
    bh = tl.program_id(1).to(tl.int64)
    source += (bh // H) * ssb + (bh % H) * ssh
    if tl.program_id(2) == 0:
        _side(
            k0, ks0, c0, o0, n0, k1, ks1, c1, o1, n1, k2, ks2, c2, o2, n2, k3, ks3, c3, o3, n3,
            k, ks, k_levels, k_edges, source, levels, like, ssn, bh, n, D, PARTS, OWN, BT, STEPS, NORM,
            KB0, KG0, KL0, KR0, KB1, KG1, KL1, KR1, KB2, KG2, KL2, KR2, KB3, KG3, KL3, KR3,
            KBT, KGT, KLT, KRT,
        )  # fmt: skip
    else:
        _side(
            v0, vs0, c0, o0, n0, v1, vs1, c1, o1, n1, v2, vs2, c2, o2, n2, v3, vs3, c3, o3, n3,
            v, vs, v_levels, v_edges, source, levels, like, ssn, bh, n, D, PARTS, OWN, BT, STEPS, NORM,
            VB0, VG0, VL0, VR0, VB1, VG1, VL1, VR1, VB2, VG2, VL2, VR2, VB3, VG3, VL3, VR3,
            VBT, VGT, VLT, VRT,
        )  # fmt: skip
