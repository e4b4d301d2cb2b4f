# mypy: ignore-errors
"""Kernels of `decode_step`: up to five launches serve all heads of a layer.

Where things lie is read from `table.Table`, whose columns are named there: the heads of a layer
may be in as many stores as there are heads, and no launch has an argument for each of them.
"""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer
from kvsearch_kernels.decode_step.turn_kernels import back, turn_heads
from kvsearch_kernels.packed_attention.attend_kernels import attend_split, store_split
from kvsearch_kernels.packed_attention.read_kernels import bits_of
from kvsearch_kernels.quantize_kv.triton_kernels import hadamard

__all__ = ["attend_heads", "combine_heads", "count", "enter", "turn_heads"]

PROGRAM = tl.constexpr(13)  # columns of a row of programs, and of one of voters
VOTER = tl.constexpr(8)


@triton.jit(do_not_specialize=["H", "G"])
def enter(
    q, k, v, rotated, like, heads, turns, skb, skh, svb, svh, H, G,
    D: tl.constexpr, HEAD: tl.constexpr, STEPS: tl.constexpr, HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (i, 0): the token of KV head i goes behind those in use of the head's pool.

    Program (i, 1 + g): query g of KV head i, rotated as packed keys are. `like` has the type of
    the pools. A token without room is not written. With HALF, the model's angle is taken back from
    so many pairs of a key.
    """
    bh = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    d = tl.arange(0, D)
    if g == 0:
        row = heads + bh * HEAD
        kind: tl.constexpr = like.dtype.element_ty
        keys = tl.load(row + 2).to(tl.pointer_type(kind))
        values = tl.load(row + 3).to(tl.pointer_type(kind))
        length = tl.load(row + 4).to(tl.pointer_type(tl.int32))
        used = tl.load(length).to(tl.int64)
        inside = d < tl.where(used < tl.load(row + 5), D, 0)
        b = bh // H
        h = bh % H
        given = k + b * skb + h * skh
        if HALF:
            turn = turns + bh * COLUMNS
            stream = tl.load(turn + 2) + used + tl.load(turn + 3)
            plain = back(given, pointer(turn, tl.float32, 4), stream, d, HALF, k.dtype.element_ty)
            key = plain.to(k.dtype.element_ty)
        else:
            key = tl.load(given + d)
        tl.store(keys + used * D + d, key.to(kind), mask=inside)
        value = tl.load(v + b * svb + h * svh + d)
        tl.store(values + used * D + d, value.to(kind), mask=inside)
        tl.debug_barrier()  # no thread may still have to read the length
        tl.store(length, (used + 1).to(tl.int32))
    else:
        at = (bh * G + g - 1) * D + d
        x = hadamard(tl.load(q + at).to(tl.float32)[None, :], 1, D, STEPS)
        tl.store(rotated + at, tl.sum(x, 0).to(rotated.dtype.element_ty))


@triton.jit
def _split(
    q, like, turned, row, partial, bits, products, levels, at, G, scale, cap,
    D: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    SCORES: tl.constexpr, ASM: tl.constexpr, TURNS: tl.constexpr,
    KB: tl.constexpr, KG: tl.constexpr, KL: tl.constexpr, KF: tl.constexpr,
    VB: tl.constexpr, VG: tl.constexpr, VL: tl.constexpr, VF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend to the split of a part that `row` of the programs describes."""
    if TURNS:
        k = turned + tl.multiple_of(tl.load(row + 4), D)
    else:
        k = pointer(row + 4, tl.uint8 if KB < 16 else like.dtype.element_ty, D * KB // 8)
    WIDE: tl.constexpr = D if KG < 0 else D // KG  # scales in a row
    ks = pointer(row + (6 if TURNS else 5), tl.float16, WIDE * (2 if KL else 4))
    v = pointer(row + 6, tl.uint8 if VB < 16 else like.dtype.element_ty, D * VB // 8)
    vs = pointer(row + 7, tl.float16, D // VG * (2 if VL else 4))
    q += tl.load(row + 1) * G * D
    split = tl.load(row + 2).to(tl.int32)
    splits = tl.load(row + 3).to(tl.int32)
    length = tl.load(row + 8).to(tl.pointer_type(tl.int32))
    products += tl.load(row + 9)
    width = tl.load(row + 10).to(tl.int32)
    acc, total, top = attend_split(
        q, k, ks, v, vs, length, levels, products, split, splits,
        tl.load(row + 12) if KG < 0 else 0, G, width, scale, cap,
        D, GP, BN if KF and VF else BN // 2, HAS_CAP, SCORES, KB, KG, KL, KF, VB, VG, VL, VF, ASM,
        STAGES,
    )  # fmt: skip
    S: tl.constexpr = D * bits_of(VB, VF) // 16 if VF else 0
    store_split(acc, total, top, partial, bits, at.to(tl.int64), G, D, GP, S)


@triton.jit(do_not_specialize=["G"])
def attend_heads(
    q, rotated, like, turned, programs, partial, bits, products, levels, G, scale, cap,
    D: tl.constexpr, GP: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
    SCORES: tl.constexpr, ASM: tl.constexpr, TURNS: tl.constexpr, KINDS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: one split of one part of one KV head, for all its query heads.

    `KINDS` are the formats of a layer's parts, each the constants of `attend_split` and whether
    keys are rotated. Each is a branch of its own, and a program takes one. With TURNS, all keys lie
    in `turned`, in the type of the queries.
    """
    at = tl.program_id(0)
    row = programs + at * PROGRAM
    kind = tl.load(row)
    for i in tl.static_range(len(KINDS)):
        if kind == i:
            _split(
                rotated if KINDS[i][8] else q, like, turned, row, partial, bits, products, levels,
                at, G, scale, cap, D, GP, BN, HAS_CAP, SCORES, ASM, TURNS, KINDS[i][0],
                KINDS[i][1], KINDS[i][2], KINDS[i][3], KINDS[i][4], KINDS[i][5], KINDS[i][6],
                KINDS[i][7], STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["G"])
def combine_heads(
    partial, bits, out, lse, programs, heads, G,
    D: tl.constexpr, HEAD: tl.constexpr, SP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One program: one query head, whose splits it joins. A head's programs follow one another.

    Some splits have rotated values; STEPS is 0 where none have.
    """
    bh = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    first = tl.load(heads + bh * HEAD)
    splits = tl.load(heads + bh * HEAD + 1).to(tl.int32)
    turned = programs + first * PROGRAM + 11
    every = tl.arange(0, SP)
    d = tl.arange(0, D)
    c = tl.arange(0, 16)
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
        if STEPS:
            spin = tl.load(turned + i * PROGRAM, mask=there, other=0) != 0
            spun += tl.where(spin[:, None], rows, 0.0)
            rows = tl.where(spin[:, None], 0.0, rows)
        plain += rows
    result = tl.sum(plain, 0)
    if STEPS:  # rotating is linear: once for the sum of all splits
        back = hadamard(tl.sum(spun, 0)[None, :], 1, D, STEPS)
        result += tl.sum(back, 0)
    tl.store(out + (bh * G + g) * D + d, result.to(out.dtype.element_ty))
    bits_all = tl.where(total > 0, base + tl.log2(safe), float("-inf"))
    tl.store(lse + bh * G + g, bits_all * 0.6931471805599453)


@triton.jit(do_not_specialize=["G"])
def count(
    voters, heads, products, lse, G, alpha, keep,
    POWER: tl.constexpr, WINDOW: tl.constexpr, DECAY: tl.constexpr, HELD: tl.constexpr,
    HEAD: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: BN slots of one voter, in order of time; what they received is added.

    What slots received follows from products, and is added as `tally` does. Products of slots that
    are not in use were never written: lengths, `HELD` of a head at most, say which those are. POWER
    2 is any.
    """
    row = voters + tl.program_id(1) * VOTER
    N = tl.load(row + 2)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = n < N
    order = tl.load(row + 1)
    ordered = n < tl.where(order != 0, N, 0)
    picks = order.to(tl.pointer_type(tl.int64))
    at = tl.where(ordered, tl.load(picks + n, mask=ordered, other=0), n)
    head = tl.load(row + 3)
    each = tl.load(row + 4).to(tl.int32)
    used = tl.load(tl.load(heads + head * HEAD + 4).to(tl.pointer_type(tl.int32)))
    weight = 1.0
    if POWER == 1:
        weight = (tl.load(row + 5) + used).to(tl.float32)
    if POWER == 2:
        weight = tl.exp2(alpha * tl.log2((tl.load(row + 5) + used).to(tl.float32)))
    if WINDOW:
        weight = tl.where(tl.load(row + 6) - used < tl.load(row + 7), weight, 0.0)
    total = tl.zeros([BN], tl.float32)
    for i in range(0, each):
        mine = heads + (head + i) * HEAD
        there = n < 0
        for j in tl.static_range(HELD):
            start = tl.load(mine + 8 + 2 * j)
            where = tl.load(mine + 9 + 2 * j)
            some = tl.load(where.to(tl.pointer_type(tl.int32)), mask=where != 0, other=0)
            there = there | ((at >= start) & (at < start + some))
        received = products + tl.load(mine + 6) + at
        width = tl.load(mine + 7)
        for g in range(0, G):
            norm = tl.load(lse + (head + i) * G + g) * 1.4426950408889634
            norm = tl.where(norm == float("-inf"), 0.0, norm)  # nothing in use: -inf - -inf is NaN
            s = tl.load(received + g * width, mask=inside & there, other=float("-inf"))
            total += tl.exp2(s - norm)
    to = tl.load(row).to(tl.pointer_type(tl.float32)) + n
    before = tl.load(to, mask=inside, other=0.0)
    if DECAY:
        before *= keep
    tl.store(to, before + total * (weight / (each * G)), mask=inside)
