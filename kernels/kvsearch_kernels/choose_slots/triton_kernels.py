# mypy: ignore-errors
"""Kernel of `choose_slots`."""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer

COLUMNS = tl.constexpr(27)  # of a row of the table, see `triton_impl._rows`
TIERS = tl.constexpr(24)  # the first of those with slots of tiers
POOLS = tl.constexpr(5)  # at most: tiers, and 16 bits


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
def _ranks(row, x, slot, there):
    """Scores, divided by what belongs to the slots' ages if that is told."""
    divisors = tl.load(row + 19)
    if divisors != 0:
        born = tl.load(pointer(row + 18, tl.int32, 4) + slot, mask=there, other=0)
        by = divisors.to(tl.pointer_type(tl.float32)) + (_number(row, 20) - born)
        x = tl.div_rn(x, tl.load(by, mask=there, other=1.0))
    return x


@triton.jit
def _places(pool, stays, kinds):
    """Where slots are when their pools follow one another."""
    place = tl.zeros_like(pool)
    first = 0
    for p in tl.static_range(0, POOLS):
        if p < kinds:
            mine = (stays & (pool == p)).to(tl.int32)
            place = tl.where(mine != 0, first + tl.cumsum(mine, 0) - 1, place)
            first += tl.sum(mine, 0)
    return place


@triton.jit
def _lie(row, pool, stays, at, slot, n, room):
    """Where slots were, pool after pool, and where they are now."""
    place = _places(pool, stays, _number(row, 12))
    was = slot.to(tl.int64)
    places = tl.load(row + 13)
    if places != 0:
        was = tl.load(places.to(tl.pointer_type(tl.int64)) + slot, mask=stays, other=0)
    tl.store(pointer(row + 15, tl.int64, 8) + place, was, mask=stays)
    order = pointer(row + 16, tl.int64, 8)
    tl.store(order + at, place.to(tl.int64), mask=stays)
    tl.store(order + slot, slot.to(tl.int64), mask=(slot >= n) & (slot < room))


@triton.jit
def _move(row, stays, at, slot, n, room):
    """Sums and births of those that stay, and of tokens to come."""
    comes = (slot >= n) & (slot < room)
    moved = pointer(row + 22, tl.float32, 4)
    if _number(row, 21) != 0:
        tl.store(moved + slot, 0.0, mask=slot < room)
    else:
        x = tl.load(pointer(row + 17, tl.float32, 4) + slot, mask=stays, other=0.0)
        tl.store(moved + at, x, mask=stays)
        tl.store(moved + slot, 0.0, mask=comes)
    births = tl.load(row + 23)
    if births != 0:
        to = births.to(tl.pointer_type(tl.int32))
        born = tl.load(pointer(row + 18, tl.int32, 4) + slot, mask=stays, other=0)
        tl.store(to + at, born, mask=stays)
        tl.store(to + slot, _number(row, 20) + slot - n, mask=comes)


@triton.jit
def choose(table, BLOCK: tl.constexpr):
    """One program: all slots of one voter, whose row of the table `triton_impl._rows` describes."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    N = _number(row, 4)
    gone = _number(row, 5)
    sinks = _number(row, 6)
    recent = _number(row, 7)
    room = _number(row, 11)
    slot = tl.arange(0, BLOCK)
    there = slot < N
    x = tl.load(pointer(row, tl.float32, 4) + slot, mask=there, other=0.0)
    x = _ranks(row, x, slot, there)
    candidate = there & (slot >= sinks) & (slot < N - recent)
    keys = _order(x, slot)
    stays = there & ((candidate == 0) | (keys >= _threshold(keys, candidate, gone)))
    n = N - gone
    at = tl.cumsum(stays.to(tl.int32), 0) - 1
    tl.store(pointer(row + 2, tl.int64, 8) + at, slot.to(tl.int64), mask=stays)
    tiers = _number(row, 10)
    pool = tl.zeros_like(at)
    if tiers > 0:
        old = tl.zeros_like(at)
        before = tl.load(row + 1)
        if before != 0:
            old = tl.load(before.to(tl.pointer_type(tl.uint8)) + slot, mask=there, other=0)
            old = old.to(tl.int32)
        best = tl.where(old == tiers, 0, old)
        rank = tl.where((at < sinks) | (at >= n - recent), float("inf"), x)
        order = _order(rank, 1073741823 - at)
        native = (at < _number(row, 8)) | (at >= n - _number(row, 9))
        pool = tl.where(native, tiers, tiers - 1)
        placed = native | (stays == 0)
        for tier in range(0, tiers - 1):
            count = tl.load(row + TIERS + tier).to(tl.int32)
            pool, placed = _place(pool, placed, order, best, tier, count)
        tags = tl.load(row + 3).to(tl.pointer_type(tl.uint8))
        tl.store(tags + at, pool.to(tl.uint8), mask=stays)
        tl.store(tags + slot, tiers.to(tl.uint8), mask=(slot >= n) & (slot < room))
    else:
        after = tl.load(row + 14)
        if after != 0:
            pool = tl.load(after.to(tl.pointer_type(tl.uint8)) + at, mask=stays, other=0)
            pool = pool.to(tl.int32)
    if tl.load(row + 15) != 0:
        _lie(row, pool, stays, at, slot, n, room)
    if tl.load(row + 17) != 0:
        _move(row, stays, at, slot, n, room)
