# mypy: ignore-errors
"""Kernel of `settle_kv`."""

import triton
import triton.language as tl

from kvsearch_kernels.quantize_kv.triton_kernels import hadamard, to_codes


@triton.jit
def _enter(
    values, mine, levels, edges, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`values` `[BT, D]` fp32 with the rows that are `mine` as this tier reads them back.

    Few slots change their tier: where none of a program does, nothing is encoded.
    """
    if BITS == 16:
        return values
    if tl.max(mine.to(tl.int32), 0) > 0:
        values = _round(values, mine, levels, edges, D, BITS, GROUP, LLOYD, STEPS, BT)
    return values


@triton.jit
def _round(
    values, mine, levels, edges, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    LLOYD: tl.constexpr, STEPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """What `_enter` returns, computed for all rows of the program."""
    x = values
    if STEPS:
        x = hadamard(x, BT, D, STEPS)
    groups: tl.constexpr = D // GROUP
    grouped = tl.reshape(x, [BT, groups, GROUP])
    codes, step, zero = to_codes(grouped, levels, edges, BITS, LLOYD, GROUP)
    step = step.to(tl.float32)[:, :, None]
    if LLOYD:
        back = tl.load(levels + codes) * step
    else:
        back = codes.to(tl.float32) * step + zero.to(tl.float32)[:, :, None]
    x = tl.reshape(back, [BT, D])
    if STEPS:
        x = hadamard(x, BT, D, STEPS)
    return tl.where(mine[:, None], x, values)


@triton.jit
def _side(
    x, out, before, after, keep, levels0, edges0, levels1, edges1, levels2, edges2,
    sxn, sbn, san, skn, n, D: tl.constexpr, TIERS: tl.constexpr, GATHER: tl.constexpr,
    BT: tl.constexpr,
    B0: tl.constexpr, G0: tl.constexpr, L0: tl.constexpr, R0: tl.constexpr,
    B1: tl.constexpr, G1: tl.constexpr, L1: tl.constexpr, R1: tl.constexpr,
    B2: tl.constexpr, G2: tl.constexpr, L2: tl.constexpr, R2: tl.constexpr,
):  # fmt: skip
    """BT slots of the keys, or of the values, of one head."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, D)[None, :]
    inside = t < n
    source = t
    if GATHER:
        source = tl.load(keep + t * skn, mask=inside, other=0).to(tl.int64)
    was = tl.load(before + source * sbn, mask=inside, other=0)
    now = tl.load(after + t * san, mask=inside, other=0)
    moved = inside & (was != now)
    at = x + source[:, None] * sxn + d
    values = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    if TIERS > 0:
        values = _enter(values, moved & (now == 0), levels0, edges0, D, B0, G0, L0, R0, BT)
    if TIERS > 1:
        values = _enter(values, moved & (now == 1), levels1, edges1, D, B1, G1, L1, R1, BT)
    if TIERS > 2:
        values = _enter(values, moved & (now == 2), levels2, edges2, D, B2, G2, L2, R2, BT)
    tl.store(out + t[:, None] * D + d, values.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["n", "room", "H"])
def settle(
    k, v, k_out, v_out, before, after, keep,
    kl0, ke0, vl0, ve0, kl1, ke1, vl1, ve1, kl2, ke2, vl2, ve2,
    skb, skh, skn, svb, svh, svn, sbb, sbh, sbn, sab, sah, san, spb, sph, spn, n, room, H,
    D: tl.constexpr, TIERS: tl.constexpr, GATHER: tl.constexpr, BT: tl.constexpr,
    KB0: tl.constexpr, KG0: tl.constexpr, KL0: tl.constexpr, KR0: tl.constexpr,
    VB0: tl.constexpr, VG0: tl.constexpr, VL0: tl.constexpr, VR0: tl.constexpr,
    KB1: tl.constexpr, KG1: tl.constexpr, KL1: tl.constexpr, KR1: tl.constexpr,
    VB1: tl.constexpr, VG1: tl.constexpr, VL1: tl.constexpr, VR1: tl.constexpr,
    KB2: tl.constexpr, KG2: tl.constexpr, KL2: tl.constexpr, KR2: tl.constexpr,
    VB2: tl.constexpr, VG2: tl.constexpr, VL2: tl.constexpr, VR2: tl.constexpr,
):  # fmt: skip
    """One program: BT slots of one head, keys or values. The results are contiguous."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    before += b * sbb + h * sbh
    after += b * sab + h * sah
    keep += b * spb + h * sph
    if tl.program_id(2) == 0:
        _side(
            k + b * skb + h * skh, k_out + bh * room * D, before, after, keep,
            kl0, ke0, kl1, ke1, kl2, ke2, skn, sbn, san, spn, n, D, TIERS, GATHER, BT,
            KB0, KG0, KL0, KR0, KB1, KG1, KL1, KR1, KB2, KG2, KL2, KR2,
        )  # fmt: skip
    else:
        _side(
            v + b * svb + h * svh, v_out + bh * room * D, before, after, keep,
            vl0, ve0, vl1, ve1, vl2, ve2, svn, sbn, san, spn, n, D, TIERS, GATHER, BT,
            VB0, VG0, VL0, VR0, VB1, VG1, VL1, VR1, VB2, VG2, VL2, VR2,
        )  # fmt: skip
