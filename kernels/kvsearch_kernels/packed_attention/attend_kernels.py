# mypy: ignore-errors
# ruff: noqa: RUF005
"""What a program of `decode_step` does with its split of a part, whatever the formats."""

import triton
import triton.language as tl

from kvsearch_kernels.lifetime_attention.triton_kernels import soften
from kvsearch_kernels.packed_attention.lookup_kernels import (
    levels_at,
    shifts_of,
    tables_of,
)
from kvsearch_kernels.packed_attention.read_kernels import (
    affine,
    bits_of,
    channels_of,
    first_bits,
    mantissa,
    place_of,
    query_plane,
    stages_of,
    steps_of,
    upper,
    values_of,
    words,
)


@triton.jit
def attend_split(
    q, k, ks, v, vs, length, levels, products, split, splits, lead, G, width, scale, cap,
    D: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    SCORES: tl.constexpr,
    KB: tl.constexpr, KG: tl.constexpr, KL: tl.constexpr, KF: tl.constexpr,
    VB: tl.constexpr, VG: tl.constexpr, VL: tl.constexpr, VF: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to split `split` of one part of a KV head, at whose rows the pointers point.

    Keys are the rows of the scores `[BN, GP]` and channels those of the output: the few heads of a
    group are padded to 8 that way, not to 16. KF and VF say how keys and values are read: 0 as
    values, 1 as codes in place, 2 as levels looked up. With SCORES, what goes into the softmax is
    written to `products` `[G, width]`, which points at the part's first slot. Keys may be grouped
    along tokens (KG < 0), and then lack `lead` tokens of the first group. Returns planes of the
    output `[D / planes, GP]`, and the sum of weights and what they are relative to, in bits,
    `[GP]`: the largest weight, with VF the largest product of a weight and a step.
    """
    kind: tl.constexpr = q.dtype.element_ty
    length = tl.load(length)
    share = tl.cdiv(tl.cdiv(length, BN), splits) * BN
    begin = split * share
    end = tl.minimum(begin + share, length)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    n = tl.arange(0, BN)
    qt = tl.load(q + g[None, :] * D + d[:, None], mask=(g < G)[None, :], other=0.0)

    UNIT: tl.constexpr = 16777216.0  # codes are in units of fp16's least number, see `mantissa`
    # a product takes 16 channels at least
    KS: tl.constexpr = D * bits_of(KB, KF) // 16  # words of two bytes in a row
    KW: tl.constexpr = (KS if KF == 2 else max(16, KS)) if KF else D
    KC: tl.constexpr = 2 * KW  # channels of a plane, in lower and upper bytes
    bits_scale = scale * 1.4426950408889634
    # Products in bits, over SU: with packed keys they are left in units, which the fused
    # multiply-add that subtracts the maximum takes away, unless they are needed as they are.
    SU: tl.constexpr = UNIT if KF == 1 and not (SCORES or HAS_CAP) else 1.0
    KN: tl.constexpr = D // KG if KF else 1  # groups, each of whole planes or whole in one plane
    KZ: tl.constexpr = KF == 1 or not KL  # Lloyd levels that are looked up have no zero
    VZ: tl.constexpr = VF == 1 or not VL
    q_sums = ()
    # Planes of the query made before the loop stay in shared memory; made in it they are stored at
    # every turn, with two barriers each.
    planes = ()
    if KF:
        for j in tl.static_range(KN):
            whole = tl.zeros([GP], tl.float32)
            for i in tl.static_range(j * KG // KC, (j * KG + KG + KC - 1) // KC):
                place = place_of(KS, KB, KW, i) if KF == 1 else tl.full([KW], 1.0, tl.float32)
                for half in tl.static_range(2):
                    plane = query_plane(
                        q, G, bits_scale / place, D, GP, KS, KW, i, half, KG, j
                    )  # fmt: skip
                    planes = planes + (plane,)
                    part = plane.to(tl.float32)
                    whole += tl.sum(part * place[:, None], 0)
            q_sums = q_sums + (whole if SCORES or KF == 2 else whole / UNIT,)
    KA: tl.constexpr = max(1, KG // KC) * 2  # products of a group

    VS: tl.constexpr = D * bits_of(VB, VF) // 16  # words of two bytes in a row
    VW: tl.constexpr = (VS if VF == 2 else max(16, VS)) if VF else D
    VC: tl.constexpr = 2 * VW if VF else D  # channels of two planes, in lower and upper bytes
    VP: tl.constexpr = D // VC
    VH: tl.constexpr = 2 if VF else 1
    VN: tl.constexpr = D // VG if VF else 1
    VM: tl.constexpr = max(1, VC // VG) if VF else 1  # groups in two planes
    # planes with several groups are multiplied by the weights of each; rows are chosen at the end
    VA: tl.constexpr = max(1, VG // VC)  # pairs of products of a group
    acc = ()
    for _ in tl.static_range(VP * VM * VH):
        acc = acc + (tl.zeros([VW, GP], tl.float32),)
    top = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([BN, GP], tl.float32)
    zeros = ()
    for _ in tl.static_range(VN if VZ else 0):
        zeros = zeros + (tl.zeros([BN, GP], tl.float32),)
    k_first = first_bits(levels, KS, KB, KW) if KF == 1 else 0
    v_first = first_bits(levels, VS, VB, VW) if VF == 1 else 0
    k_shifts = shifts_of(levels, KB, KW) if KF == 2 else ()
    k_tables = tables_of(levels, KB, KL, ASM) if KF == 2 else ()
    v_shifts = shifts_of(levels, VB, VW) if VF == 2 else ()
    v_tables = tables_of(levels, VB, VL, ASM) if VF == 2 else ()
    # steps that are loaded a tile ahead
    K_EARLY: tl.constexpr = KN if KF and KL else 0
    V_EARLY: tl.constexpr = VN if VF and VL else 0
    ahead = tl.minimum(begin + n, tl.maximum(end - 1, 0))
    k_next, v_next = steps_of(ks, ahead, K_EARLY), steps_of(vs, ahead, V_EARLY)
    for start in tl.range(begin, end, BN, num_stages=stages_of(STAGES, BN, D, KB, KF, VB, VF)):
        inside = start + n < end
        # the last row again beyond the end, so that no load needs a mask; its weight there is 0
        row = tl.minimum(start + n, end - 1).to(tl.int64)
        k_now, v_now = k_next, v_next
        ahead = tl.minimum(start + BN + n, end - 1)
        k_next, v_next = steps_of(ks, ahead, K_EARLY), steps_of(vs, ahead, V_EARLY)
        beyond = tl.where(inside, 0.0, float("-inf"))
        if KF:
            if KF == 1:
                low = words(k, row, D, KB, KW, 0)
                high = upper(low, ASM)
            else:
                looked = levels_at(k, row, k_shifts, k_tables, levels, D, KB, KL, ASM, 0)
            for j in tl.static_range(KN):
                dots = tl.zeros([BN, GP], tl.float32)
                for i in tl.static_range(j * KG // KC, (j * KG + KG + KC - 1) // KC):
                    if KF == 1:
                        in_low = mantissa(low, k_first, KS, KB, KW, i, ASM, 0)
                        in_high = mantissa(high, k_first, KS, KB, KW, i, ASM, 0)
                    else:
                        in_low = looked[i]
                        in_high = looked[2 + i]
                    dots = tl.dot(in_low, planes[j * KA + (i - j * KG // KC) * 2], dots)
                    dots = tl.dot(in_high, planes[j * KA + (i - j * KG // KC) * 2 + 1], dots)
                step, zero, _size = affine(ks, k_now, row, KB, KL, KN, j)
                if SCORES and KF == 1:
                    step *= UNIT
                # two fused multiply-adds; the first also masks, for less than a select would take
                if j == 0:
                    s = dots * step[:, None] + beyond[:, None]
                else:
                    s = dots * step[:, None] + s
                if KZ:
                    s += q_sums[j][None, :] * zero[:, None]
            if HAS_CAP:
                s = soften(s, (1.0 if SCORES or KF == 2 else UNIT) * 0.6931471805599453, cap, True)
        else:
            keys = values_of(k, ks, levels, row, inside, D, KB, KG, KL, kind, lead)
            s = soften(tl.dot(keys, qt, input_precision="ieee"), scale, cap, HAS_CAP)
        if SCORES:
            at = products + g[None, :].to(tl.int64) * width + row[:, None]
            tl.store(at, s, mask=inside[:, None] & (g < G)[None, :])
        if HAS_CAP or not KF:
            s = tl.where(inside[:, None], s, float("-inf"))
        v_steps = ()
        v_zeros = ()
        if VF:
            for j in tl.static_range(VN):
                step, zero, size = affine(vs, v_now, row, VB, VL, VN, j)
                v_steps = v_steps + (step,)
                v_zeros = v_zeros + (zero,)
                if j == 0:
                    largest = size
                else:
                    largest = tl.maximum(largest, size)
            # Weight x step has to fit fp16, and next to a sink it is far smaller than the weight
            # alone. So `top` is about the largest of the products, in bits, and sums stay finite
            # because no step counts as nothing, see `affine`.
            step_sizes = tl.broadcast_to(largest[:, None], s.shape) * (0.0009765625 / SU)
            higher = tl.maximum(top, tl.max(s + step_sizes, 0) * SU - 15.0)
        else:
            higher = tl.maximum(top, tl.max(s, 0) * SU)
        p = tl.exp2(s * SU - higher[None, :])
        shrink = tl.exp2(top - higher)
        total = total * shrink[None, :] + p
        top = higher
        if VF:
            if VF == 1:
                v_low = words(v, row, D, VB, VW, 1)
                v_high = upper(v_low, ASM)
            else:
                looked_v = levels_at(v, row, v_shifts, v_tables, levels, D, VB, VL, ASM, 1)
            new = ()
            new_zeros = ()
            for j in tl.static_range(VN):
                w = (p * v_steps[j][:, None]).to(tl.float16)
                if VZ:
                    new_zeros = new_zeros + (zeros[j] * shrink[None, :] + p * v_zeros[j][:, None],)
                for i in tl.static_range(j * VG // VC, (j * VG + VG + VC - 1) // VC):
                    for half in tl.static_range(2):
                        if VF == 1:
                            held = v_high if half else v_low
                            values = mantissa(held, v_first, VS, VB, VW, i, ASM, 1)
                        else:
                            values = looked_v[i + 2 * half]
                        before = acc[(j * VA + i - j * VG // VC) * 2 + half] * shrink[None, :]
                        new = new + (tl.dot(values, w, before),)
            acc = new
            zeros = new_zeros
        else:
            if VB == 16:
                values = tl.load(v + row[None, :] * D + d[:, None]).to(kind)
            else:
                values = tl.trans(values_of(v, vs, levels, row, inside, D, VB, VG, VL, kind))
            acc = (tl.dot(values, p.to(kind), acc[0] * shrink[None, :], input_precision="ieee"),)
    if VF:
        new = ()
        for i in tl.static_range(VP):
            unit = UNIT / place_of(VS, VB, VW, i) if VF == 1 else tl.full([VW], 1.0, tl.float32)
            for half in tl.static_range(2):
                group = channels_of(VS, VW, i, half) // VG
                for m in tl.static_range(VM):
                    rows = acc[(i * VM + m) * 2 + half] * unit[:, None]
                    if VZ:
                        rows += tl.sum(zeros[i * VC // VG + m], 0)[None, :]
                    if m == 0:
                        plane = rows
                    else:
                        plane = tl.where((group == i * VM + m)[:, None], rows, plane)
                new = new + (plane,)
        acc = new
    return acc, tl.sum(total, 0), top


@triton.jit
def store_split(
    acc, total, top, partial, bits, at, G, D: tl.constexpr, GP: tl.constexpr, S: tl.constexpr
):
    """Write one split: normalised output and log2-sum-exp2; S words make a row, 0 of values."""
    g = tl.arange(0, GP)
    heads = g < G
    some = total > 0
    safe = tl.where(some, total, 1.0)
    tl.store(bits + at * G + g, tl.where(some, top + tl.log2(safe), float("-inf")), mask=heads)
    W: tl.constexpr = D // len(acc)
    for i in tl.static_range(len(acc)):
        channel = channels_of(S, W, i // 2, i % 2) if S else tl.arange(0, D)
        to = partial + (at * G + g)[None, :] * D + channel[:, None]
        tl.store(to, acc[i] / safe[None, :], mask=heads[None, :])
