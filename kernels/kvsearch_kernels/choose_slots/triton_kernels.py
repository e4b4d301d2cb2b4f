# mypy: ignore-errors
"""Kernel of `choose_slots`."""

import triton
import triton.language as tl


@triton.jit
def _order(scores, slot):
    """Integers of 62 bits that rise with `scores`, then with `slot`; as the reference orders."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((bits.to(tl.int64) + 2147483648) << 30) + slot


@triton.jit
def _threshold(keys, among, count):
    """The largest number below which there are at most `count` of the different keys `among`."""
    found = tl.full([], 0, tl.int64)
    step = tl.full([], 1, tl.int64) << 62
    for _ in range(63):
        below = tl.sum((among & (keys < (found | step))).to(tl.int32), 0)
        found = tl.where(below <= count, found | step, found)
        step = step >> 1
    return found


@triton.jit
def _place(
    pool, placed, order, best, tier: tl.constexpr, count, BLOCK: tl.constexpr
):  # fmt: skip
    """Put the best `count` slots that are not placed into a tier, unspoilt ones first."""
    keys = order | (tl.where(best > tier, 0, 1).to(tl.int64) << 62)
    free = placed == 0
    left = tl.sum(free.to(tl.int32), 0)
    chosen = free & (keys >= _threshold(keys, free, left - count))
    return tl.where(chosen, tier, pool), placed | chosen


@triton.jit(
    do_not_specialize=[
        "N", "V", "gone", "sinks", "recent", "count0", "count1", "count2", "fp16_sinks",
        "fp16_recent",
    ]
)  # fmt: skip
def choose(
    scores, before, keep, pools, ssb, ssv, ssn, sbb, sbv, sbn, N, V, gone, sinks, recent,
    count0, count1, count2, fp16_sinks, fp16_recent, TIERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: all slots of one voter. `keep` and `pools` are contiguous."""
    bv = tl.program_id(0).to(tl.int64)
    b, v = bv // V, bv % V
    slot = tl.arange(0, BLOCK)
    there = slot < N
    x = tl.load(scores + b * ssb + v * ssv + slot * ssn, mask=there, other=0.0)
    candidate = there & (slot >= sinks) & (slot < N - recent)
    keys = _order(x, slot)
    stays = there & ((candidate == 0) | (keys >= _threshold(keys, candidate, gone)))
    n = N - gone
    at = tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(keep + bv * n + at, slot.to(tl.int64), mask=stays)
    if TIERS > 0:
        old = tl.load(before + b * sbb + v * sbv + slot * sbn, mask=there, other=0).to(tl.int32)
        best = tl.where(old == TIERS, 0, old)
        rank = tl.where((at < sinks) | (at >= n - recent), float("inf"), x)
        order = _order(rank, 1073741823 - at)
        native = (at < fp16_sinks) | (at >= n - fp16_recent)
        pool = tl.where(native, TIERS, TIERS - 1)
        placed = native | (stays == 0)
        if TIERS > 1:
            pool, placed = _place(pool, placed, order, best, 0, count0, BLOCK)
        if TIERS > 2:
            pool, placed = _place(pool, placed, order, best, 1, count1, BLOCK)
        if TIERS > 3:
            pool, placed = _place(pool, placed, order, best, 2, count2, BLOCK)
        tl.store(pools + bv * n + at, pool.to(tl.uint8), mask=stays)
