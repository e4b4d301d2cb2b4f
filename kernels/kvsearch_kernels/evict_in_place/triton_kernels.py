# mypy: ignore-errors
"""Kernel of `evict_in_place`: one program for each KV head goes through all intervals."""

import triton
import triton.language as tl

from kvsearch_kernels.choose_slots.triton_kernels import _threshold
from kvsearch_kernels.lifetime_attention.triton_kernels import soften


@triton.jit
def _copy(to, of, count, D: tl.constexpr, ROWS: tl.constexpr):
    """Rows `[count, D]`, one after the other in both places."""
    d = tl.arange(0, D)[None, :]
    for start in range(0, count, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        tl.store(to + row * D + d, tl.load(of + row * D + d, mask=row < count), mask=row < count)


@triton.jit
def _attend(
    q, keys, values, products, out, first, rows, S, n, c, cap,
    D: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """BM queries from number `first` on, to all slots; writes output and `products` `[BM, S]`.

    Returns:
        Log2-sum-exp2 of the products in bits, `[BM]`.
    """
    m = tl.arange(0, BM)
    d = tl.arange(0, D)
    row = first + m
    qs = tl.load(q + row[:, None] * D + d[None, :], mask=(row < rows)[:, None], other=0.0)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    for start in range(0, S, BN):
        slot = start + tl.arange(0, BN)
        inside = slot < S
        at = slot[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        s = soften(tl.dot(qs, tl.trans(k), input_precision="ieee"), 1.0, cap, HAS_CAP)
        seen = inside[None, :] & ((slot - n)[None, :] <= (row % c)[:, None])
        s = tl.where(seen, s, float("-inf"))
        tl.store(products + m[:, None] * S + slot[None, :], s, mask=inside[None, :])
        higher = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher
    at = out + row[:, None] * D + d[None, :]
    tl.store(at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(row < rows)[:, None])
    return top + tl.log2(total)


@triton.jit
def _receive(
    products, sums, weights, lse, first, rows, S, c, carry, BN: tl.constexpr, BM: tl.constexpr
):
    """Add what slots receive from BM queries to `carry` times their sums."""
    m = tl.arange(0, BM)
    row = first + m
    weight = tl.load(weights + row % c, mask=row < rows, other=0.0)
    for start in range(0, S, BN):
        slot = start + tl.arange(0, BN)
        inside = slot < S
        s = tl.load(products + m[:, None] * S + slot[None, :], mask=inside[None, :], other=0.0)
        got = tl.sum(tl.exp2(s - lse[:, None]) * weight[:, None], 0)
        before = tl.load(sums + slot, mask=inside, other=0.0)
        tl.store(sums + slot, before * carry + got, mask=inside)


@triton.jit
def _pick(
    sums, born, divisors, listed, S, n, c, low, high, recent, seen,
    SP: tl.constexpr, CP: tl.constexpr, AGED: tl.constexpr,
):  # fmt: skip
    """Write to `listed` `[2, CP]` which slots before n are to be freed, and who of the new stays.

    Returns:
        How many.
    """
    slot = tl.arange(0, SP)
    there = slot < S
    rank = tl.load(sums + slot, mask=there, other=0.0)
    birth = tl.load(born + slot, mask=there, other=0)
    if AGED:
        age = (seen - birth).to(tl.int32)
        rank = tl.div_rn(rank, tl.load(divisors + age, mask=there, other=1.0))
    keys = (rank.to(tl.int32, bitcast=True).to(tl.int64) << 32) + birth
    may = there & (slot >= low) & (slot < high) & (birth < seen - recent)
    goes = may & (keys < _threshold(keys, may, c))
    old = goes & (slot < n)
    stays = there & (slot >= n) & (goes == 0)
    tl.store(listed + tl.cumsum(old.to(tl.int32), 0) - 1, slot, mask=old)
    tl.store(listed + CP + tl.cumsum(stays.to(tl.int32), 0) - 1, slot - n, mask=stays)
    return tl.sum(old.to(tl.int32), 0)


@triton.jit
def _settle(
    keys, values, sums, born, kept_k, kept_v, listed, count, n, c, seen,
    D: tl.constexpr, CP: tl.constexpr, ROWS: tl.constexpr, FORGETS: tl.constexpr,
):  # fmt: skip
    """New tokens that stay, into the places of those that go."""
    d = tl.arange(0, D)[None, :]
    for start in range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        there = i < count
        at = tl.load(listed + i, mask=there, other=0)
        which = tl.load(listed + CP + i, mask=there, other=0)
        tl.store(born + at, (seen + which).to(tl.int64), mask=there)
        if not FORGETS:
            tl.store(sums + at, tl.load(sums + n + which, mask=there, other=0.0), mask=there)
        to, of, both = at[:, None] * D + d, which[:, None] * D + d, there[:, None]
        tl.store(keys + to, tl.load(kept_k + of, mask=both), mask=both)
        tl.store(values + to, tl.load(kept_v + of, mask=both), mask=both)
    tl.debug_barrier()
    i = tl.arange(0, CP)
    tl.store(sums + n + i, 0.0, mask=i < c)


@triton.jit(
    do_not_specialize=["J", "S", "c", "rows", "low", "high", "recent", "seen", "carry", "cap"]
)
def evict(
    slots, sums, born, q, new, kept, weights, divisors, products, listed, out,
    J, S, c, rows, low, high, recent, seen, carry, cap,
    D: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr,
    ROWS: tl.constexpr, HAS_CAP: tl.constexpr, AGED: tl.constexpr, FORGETS: tl.constexpr,
):  # fmt: skip
    """One program: all intervals of one KV head. What it writes it reads again, behind barriers."""
    head = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(0).to(tl.int64)
    n = S - c
    keys = slots + head * S * D
    values = keys + heads * S * D
    sums += head * S
    born += head * S
    products += head * BM * S
    listed += head * 2 * CP
    i = tl.arange(0, CP)
    for j in range(J):
        fresh = (heads * 2 * j + head) * c * D
        apart = heads * c * D
        at = (heads * j + head) * rows * D
        _copy(keys + n * D, new + fresh, c, D, ROWS)
        _copy(values + n * D, new + fresh + apart, c, D, ROWS)
        tl.store(born + n + i, (seen + i).to(tl.int64), mask=i < c)
        tl.debug_barrier()
        share = carry * (0.0 if FORGETS else 1.0)
        for first in range(0, rows, BM):
            lse = _attend(
                q + at, keys, values, products, out + at, first, rows, S, n, c, cap, D, BN, BM,
                HAS_CAP,
            )  # fmt: skip
            tl.debug_barrier()
            _receive(products, sums, weights, lse, first, rows, S, c, share, BN, BM)
            tl.debug_barrier()
            share = share * 0.0 + 1.0
        count = _pick(
            sums, born, divisors, listed, S, n, c, low, high, recent, seen + c, SP, CP, AGED
        )
        tl.debug_barrier()
        _settle(
            keys, values, sums, born, kept + fresh, kept + fresh + apart, listed, count, n, c,
            seen, D, CP, ROWS, FORGETS,
        )  # fmt: skip
        tl.debug_barrier()
        seen += c
