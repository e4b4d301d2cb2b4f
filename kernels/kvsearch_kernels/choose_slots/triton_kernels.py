# mypy: ignore-errors
"""Kernel of `choose_slots`."""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer

COLUMNS = tl.constexpr(14)  # of a row of the table


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
def _place(pool, placed, order, best, tier, count):
    """Put the best `count` slots that are not placed into a tier, unspoilt ones first."""
    keys = order | (tl.where(best > tier, 0, 1).to(tl.int64) << 62)
    free = placed == 0
    left = tl.sum(free.to(tl.int32), 0)
    chosen = free & (keys >= _threshold(keys, free, left - count))
    return tl.where(chosen, tier, pool), placed | chosen


@triton.jit
def _number(row, column: tl.constexpr):
    return tl.load(row + column).to(tl.int32)


@triton.jit
def choose(table, BLOCK: tl.constexpr):
    """One program: all slots of one voter, whose row of the table `triton_impl._rows` describes."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    N = _number(row, 4)
    gone = _number(row, 5)
    sinks = _number(row, 6)
    recent = _number(row, 7)
    slot = tl.arange(0, BLOCK)
    there = slot < N
    x = tl.load(pointer(row, tl.float32, 4) + slot, mask=there, other=0.0)
    candidate = there & (slot >= sinks) & (slot < N - recent)
    keys = _order(x, slot)
    stays = there & ((candidate == 0) | (keys >= _threshold(keys, candidate, gone)))
    n = N - gone
    at = tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(pointer(row + 2, tl.int64, 8) + at, slot.to(tl.int64), mask=stays)
    tiers = _number(row, 10)
    if tiers > 0:
        before = tl.load(row + 1).to(tl.pointer_type(tl.uint8))
        old = tl.load(before + slot, mask=there, other=0).to(tl.int32)
        best = tl.where(old == tiers, 0, old)
        rank = tl.where((at < sinks) | (at >= n - recent), float("inf"), x)
        order = _order(rank, 1073741823 - at)
        native = (at < _number(row, 8)) | (at >= n - _number(row, 9))
        pool = tl.where(native, tiers, tiers - 1)
        placed = native | (stays == 0)
        for tier in range(0, tiers - 1):
            count = tl.load(row + 11 + tier).to(tl.int32)
            pool, placed = _place(pool, placed, order, best, tier, count)
        after = tl.load(row + 3).to(tl.pointer_type(tl.uint8))
        tl.store(after + at, pool.to(tl.uint8), mask=stays)
