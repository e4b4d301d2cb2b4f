# mypy: ignore-errors
"""Loops of the CPU implementations, compiled by numba at their first use and kept on disk.

They are in one file, with every constant that they read, because numba's cache notices a change of
the file that a function is in, and of no other. Tensors come as addresses and strides in rows of
integers (`numba_args`): so the number of parts, their formats and their types are data, and nothing
is compiled for them.
"""

import math

import numpy as np
from numba import carray, float32, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

# One side of a part, keys or values, as `numba_args.side` says it: where vectors are, with strides
# in bytes; where scales are, with strides in numbers; tokens that the first group of scales lacks;
# and the format.
(
    AT, STRIDE_B, STRIDE_H, STRIDE_N, SCALES, SCALE_B, SCALE_H, SCALE_N, SCALE_G,
    LEAD, KIND, WIDTH, BITS, GROUP, NUMBERS, EVEN, FIRST, TABLE, BLOCK, ALONG, PIECE,
) = range(21)  # fmt: skip
SIDE = 21
SLOTS, LENGTHS = 2 * SIDE, 2 * SIDE + 1  # of a part: slots, and where those in use are, or 0
HEADS = 15  # integers of a row of heads, before those of their angles
FP16, BF16, SINGLE, DOUBLE, PACKED = range(5)  # kinds
# How keys of a layer's heads are turned, as `decode_step.numba_impl` says it: angles, pairs of
# channels that turn (0: keys are as they are), what slots are numbered by, with strides, and slots
# of other parts than the pool.
ANGLES, PAIRS, INDEX, BEFORE, TURN = 0, 1, 2, 6, 7
FINE = 64  # angles of as many positions, then of multiples of that: any other is a sum of two
ROWS = 32  # unpacked at once
PLACED, SPOILT = -(1 << 63), 1 << 62  # orders of slots, see `choose_slots.reference`
LANES = 16  # numbers that are compared side by side
LOOSE = {"reassoc", "contract", "nsz", "arcp"}  # sums in any order; NaN and infinity mean the same


def compiled(fastmath=False):
    """`njit` that keeps what it compiled, where there is a place to keep it."""

    def wrap(function):
        try:
            return njit(cache=True, nogil=True, fastmath=fastmath)(function)
        except RuntimeError:  # neither beside the file nor in the user's cache folder
            return njit(nogil=True, fastmath=fastmath)(function)

    return wrap


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _from_half(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.fpext(
            builder.bitcast(args[0], cgutils.ir.HalfType()), cgutils.ir.FloatType()
        )

    return types.float32(types.uint16), codegen


@intrinsic
def _to_half(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(
            builder.fptrunc(args[0], cgutils.ir.HalfType()), cgutils.ir.IntType(16)
        )

    return types.uint16(types.float32), codegen


@intrinsic
def _bits_of(typingctx, x):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], cgutils.ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def _from_bits(typingctx, bits):
    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], cgutils.ir.FloatType())

    return types.float32(types.uint32), codegen


# -- vectors -----------------------------------------------------------------------------------


@compiled()
def hadamard(x, block):
    """Rotate one vector fp32 or fp64 in place; the sums are those of `reference.hadamard`."""
    norm = x.dtype.type(block**-0.5)
    for start in range(0, x.shape[0], block):
        y = x[start : start + block]
        step = 1
        while step < block:
            for i in range(0, block, 2 * step):
                low, high = y[i : i + step], y[i + step : i + 2 * step]
                for k in range(step):
                    a, b = low[k], high[k]
                    low[k], high[k] = a + b, a - b
            step *= 2
        for k in range(block):
            y[k] *= norm


@compiled()
def _unpack_whole(side, codes_at, scales_at, first, count, out):
    """`_unpack_planes` of 8 or 4 bits with one scale a vector, in a third of its time.

    Both planes come at once. At 2 bits the same, with four planes, was slower.
    """
    bits, even, numbers, stride = side[BITS], side[EVEN], side[NUMBERS], side[STRIDE_N]
    scales, share = scales_at + 2 * first * side[SCALE_N], side[WIDTH] * bits // 8
    lowest, levels = float32(side[FIRST]), carray(_pointer(side[TABLE]), 256, np.float32)
    scale_stride = 2 * side[SCALE_N]
    nibble, four = np.uint8(15), np.uint8(4)
    for t in range(count):
        number = carray(_pointer(scales + t * scale_stride), 2, np.uint16)
        step = _from_half(number[0]) if numbers else float32(1)
        zero = _from_half(number[1]) if numbers == 2 else float32(-0.0)  # changes nothing
        byte, row = carray(_pointer(codes_at + t * stride), share, np.uint8), out[t]
        if even and bits == 8:
            for i in range(share):
                row[i] = (float32(byte[i]) + lowest) * step + zero
        elif even and bits == 4:
            for i in range(share):
                row[i] = (float32(byte[i] & nibble) + lowest) * step + zero
                row[share + i] = (float32(byte[i] >> four) + lowest) * step + zero
        elif bits == 8:
            for i in range(share):
                row[i] = levels[byte[i]] * step + zero
        else:
            for i in range(share):
                row[i] = levels[byte[i] & nibble] * step + zero
                row[share + i] = levels[byte[i] >> four] * step + zero


@compiled()
def _unpack_planes(side, codes_at, scales_at, first, count, out):
    """`_unpack` of 8, 4, 2 or 1 bits, piece by piece.

    A piece is channels that share a plane of the codes and a scale. Loops over vectors are in here,
    since calls with slices of arrays cost more than what they would do.
    """
    width, bits, group, piece = side[WIDTH], side[BITS], side[GROUP], side[PIECE]
    even, numbers = side[EVEN], side[NUMBERS]
    stride, scale_stride, group_stride = side[STRIDE_N], 2 * side[SCALE_N], 2 * side[SCALE_G]
    share, mask, lowest = width * bits // 8, np.uint8((1 << bits) - 1), float32(side[FIRST])
    levels = carray(_pointer(side[TABLE]), 256, np.float32)
    for start in range(0, width, piece):
        shift = np.uint8(start // share * bits)
        codes, scales = codes_at + start % share, scales_at + start // group * group_stride
        for t in range(count):
            pair = carray(_pointer(scales + (first + t) * scale_stride), 2, np.uint16)
            step = _from_half(pair[0]) if numbers else float32(1)
            zero = _from_half(pair[1]) if numbers == 2 else float32(-0.0)  # changes nothing
            part = out[t, start : start + piece]
            lower = carray(_pointer(codes + t * stride), piece, np.uint8)
            if even:
                for i in range(piece):
                    part[i] = (float32((lower[i] >> shift) & mask) + lowest) * step + zero
            else:
                for i in range(piece):
                    part[i] = levels[(lower[i] >> shift) & mask] * step + zero


@compiled()
def _unpack_split(side, codes_at, scales_at, first, count, out):
    """`_unpack` of 5 and 3 bits, whose highest bits lie apart: codes first, then their levels."""
    width, bits, group = side[WIDTH], side[BITS], side[GROUP]
    even, along, numbers, lead = side[EVEN], side[ALONG], side[NUMBERS], side[LEAD] + first
    low = bits - 1
    share, eighth = width * low // 8, width // 8
    mask, up, one = np.uint8((1 << low) - 1), np.uint8(low), np.uint8(1)
    lowest, levels = float32(side[FIRST]), carray(_pointer(side[TABLE]), 256, np.float32)
    codes = np.empty(width, np.uint8)
    for t in range(count):
        at = codes_at + t * side[STRIDE_N]
        lower = carray(_pointer(at), share, np.uint8)
        for p in range(8 // low):
            shift, plane = np.uint8(p * low), codes[p * share : (p + 1) * share]
            for i in range(share):
                plane[i] = (lower[i] >> shift) & mask
        upper = carray(_pointer(at + share), eighth, np.uint8)
        for p in range(8):
            shift, plane = np.uint8(p), codes[p * eighth : (p + 1) * eighth]
            for i in range(eighth):
                plane[i] |= ((upper[i] >> shift) & one) << up
        row = (lead + t) // along if along else first + t
        for start in range(0, width, group):
            number = scales_at + 2 * (row * side[SCALE_N] + start // group * side[SCALE_G])
            pair = carray(_pointer(number), 2, np.uint16)
            step = _from_half(pair[0]) if numbers else float32(1)
            zero = _from_half(pair[1]) if numbers == 2 else float32(-0.0)  # changes nothing
            mine, values = codes[start : start + group], out[t, start : start + group]
            if even:
                for i in range(group):
                    values[i] = (float32(mine[i]) + lowest) * step + zero
            else:
                for i in range(group):
                    values[i] = levels[mine[i]] * step + zero


@compiled()
def _unpack_along(side, codes_at, scales_at, first, count, out):
    """`_unpack` of 8, 4, 2 or 1 bits in groups along tokens: scales are read once a group."""
    width, bits, numbers, apart = side[WIDTH], side[BITS], side[NUMBERS], side[SCALE_G]
    share, mask, lowest = width * bits // 8, np.uint8((1 << bits) - 1), float32(side[FIRST])
    levels = carray(_pointer(side[TABLE]), 256, np.float32)
    steps, zeros = np.ones(width, np.float32), np.full(width, float32(-0.0))
    held = -1
    for t in range(count):
        row = (side[LEAD] + first + t) // side[ALONG]
        if row != held and numbers:
            at = scales_at + 2 * row * side[SCALE_N]
            every = carray(_pointer(at), (width - 1) * apart + numbers, np.uint16)
            for i in range(width):
                steps[i] = _from_half(every[i * apart])
            if numbers == 2:
                for i in range(width):
                    zeros[i] = _from_half(every[i * apart + 1])
        held = row
        byte = carray(_pointer(codes_at + t * side[STRIDE_N]), share, np.uint8)
        for start in range(0, width, share):
            shift, part = np.uint8(start // share * bits), out[t, start : start + share]
            step, zero = steps[start : start + share], zeros[start : start + share]
            if side[EVEN]:
                for i in range(share):
                    part[i] = (float32((byte[i] >> shift) & mask) + lowest) * step[i] + zero[i]
            else:
                for i in range(share):
                    part[i] = levels[(byte[i] >> shift) & mask] * step[i] + zero[i]


@compiled()
def _unpack(side, codes_at, scales_at, first, count, out):
    """`count` packed vectors of a head to values."""
    if side[BITS] == 5 or side[BITS] == 3:
        _unpack_split(side, codes_at, scales_at, first, count, out)
    elif side[ALONG]:
        _unpack_along(side, codes_at, scales_at, first, count, out)
    elif side[GROUP] == side[WIDTH] and side[BITS] >= 4:
        _unpack_whole(side, codes_at, scales_at, first, count, out)
    else:
        _unpack_planes(side, codes_at, scales_at, first, count, out)


@compiled()
def _copy(kind, at, stride, count, width, out):
    """`count` vectors of a head that are not packed."""
    for t in range(count):
        row = out[t]
        if kind == FP16:
            halves = carray(_pointer(at + t * stride), width, np.uint16)
            for i in range(width):
                row[i] = _from_half(halves[i])
        elif kind == BF16:
            halves = carray(_pointer(at + t * stride), width, np.uint16)
            for i in range(width):
                row[i] = _from_bits(np.uint32(halves[i]) << np.uint32(16))
        elif kind == SINGLE:
            singles = carray(_pointer(at + t * stride), width, np.float32)
            for i in range(width):
                row[i] = singles[i]
        else:
            doubles = carray(_pointer(at + t * stride), width, np.float64)
            for i in range(width):
                row[i] = doubles[i]


@compiled()
def _read(side, b, h, first, count, plain, values, out):
    """`count` vectors of one head to `out`; with `plain`, turned back if they were rotated.

    `values` is room for as many in fp32, in which vectors are turned back.
    """
    at = side[AT] + b * side[STRIDE_B] + h * side[STRIDE_H] + first * side[STRIDE_N]
    if side[KIND] != PACKED:
        _copy(side[KIND], at, side[STRIDE_N], count, side[WIDTH], out)
        return
    scales = side[SCALES] + 2 * (b * side[SCALE_B] + h * side[SCALE_H])
    if not (plain and side[BLOCK]):
        _unpack(side, at, scales, first, count, out)
        return
    _unpack(side, at, scales, first, count, values)
    for t in range(count):
        hadamard(values[t, : side[WIDTH]], side[BLOCK])
        for i in range(side[WIDTH]):
            out[t, i] = values[t, i]


# -- attention ---------------------------------------------------------------------------------


@compiled()
def _exp_single(x):
    """`exp` of fp32 up to 0, to 2 units in the last place; Cephes' polynomial, as vectors can."""
    n = np.floor(x * float32(1.44269504088896341) + float32(0.5))
    r = x - n * float32(0.693359375)
    r = r - n * float32(-2.12194440e-4)
    y = float32(1.9875691500e-4)
    y = y * r + float32(1.3981999507e-3)
    y = y * r + float32(8.3334519073e-3)
    y = y * r + float32(4.1665795894e-2)
    y = y * r + float32(1.6666665459e-1)
    y = y * r + float32(5.0000001201e-1)
    y = y * r * r + r + float32(1)
    power = np.int32(max(n, float32(-126))) + np.int32(127)
    y *= _from_bits(np.uint32(power) << np.uint32(23))
    return y if x > float32(-87) else float32(0) if x == x else x


def _exp(x):
    return math.exp(x)


@overload(_exp)
def _exp_of(x):
    return _single if x == types.float32 else lambda x: math.exp(x)


def _single(x):
    return _exp_single(x)


@compiled(LOOSE)
def _products(q, keys, count, s, first):
    """Products `s[:, first : first + count]` of queries `[G, D]` and the first keys."""
    for t in range(count):
        key = keys[t]
        for g in range(q.shape[0]):
            query, total = q[g], q.dtype.type(0)
            for d in range(query.shape[0]):
                total += query[d] * key[d]
            s[g, first + t] = total


@compiled(LOOSE)
def _weigh(p, first, values, count, out):
    """Add weights `p[:, first : first + count]` times the first values to `out` `[G, D]`."""
    width, whole = out.shape[1], count // 4 * 4
    for g in range(out.shape[0]):
        total, weights = out[g], p[g, first : first + count]
        for t in range(0, whole, 4):  # so that a sum is read and written once for four values
            a, b, c, d = weights[t], weights[t + 1], weights[t + 2], weights[t + 3]
            one, two, three, four = values[t], values[t + 1], values[t + 2], values[t + 3]
            for i in range(width):
                total[i] += (a * one[i] + b * two[i]) + (c * three[i] + d * four[i])
        for t in range(whole, count):
            weight, value = weights[t], values[t]
            for i in range(width):
                total[i] += weight * value[i]


@compiled()
def _largest(s):
    """The largest number of `s`, lane by lane, which vectors can."""
    lanes = np.full(LANES, -np.inf, s.dtype)
    whole = s.shape[0] // LANES * LANES
    for i in range(0, whole, LANES):
        part = s[i : i + LANES]
        for k in range(LANES):
            lanes[k] = part[k] if part[k] > lanes[k] else lanes[k]
    for i in range(whole, s.shape[0]):
        lanes[0] = max(lanes[0], s[i])
    return lanes.max()


@compiled(LOOSE)
def _softmax(s):
    """Products of one query to weights, in place; the largest product and the sum of weights."""
    largest, total = _largest(s), s.dtype.type(0)
    if largest == -np.inf:
        s[:] = 0
        return largest, total
    for i in range(s.shape[0]):
        s[i] = _exp(s[i] - largest)
        total += s[i]
    return largest, total


@compiled()
def _slots_in_use(part, b, h, heads):
    if part[LENGTHS] == 0:
        return part[SLOTS]
    return carray(_pointer(part[LENGTHS] + 4 * (b * heads + h)), 1, np.int32)[0]


@compiled()
def _slots_of(parts):
    slots = 0
    for part in parts:
        slots += part[SLOTS]
    return slots


@compiled()
def _turn(row, pairs, cos, sin):
    """Turn channels i and `pairs` + i of a vector by an angle each, in place."""
    kind = row.dtype.type
    low, high = row[:pairs], row[pairs : 2 * pairs]
    for i in range(pairs):
        a, b, c, s = low[i], high[i], kind(cos[i]), kind(sin[i])
        low[i], high[i] = a * c - b * s, b * c + a * s


@compiled()
def _angles(turn, position, cos, sin):
    """Cosines and sines fp64 of the angles of a position."""
    pairs = turn[PAIRS]
    size, fine, more = 16 * pairs, position % FINE, FINE + position // FINE
    low = carray(_pointer(turn[ANGLES] + fine * size), (2, pairs), np.float64)
    high = carray(_pointer(turn[ANGLES] + more * size), (2, pairs), np.float64)
    for i in range(pairs):
        cos[i] = low[0, i] * high[0, i] - low[1, i] * high[1, i]
        sin[i] = low[1, i] * high[0, i] + low[0, i] * high[1, i]


@compiled()
def _turn_slots(turn, b, h, first, count, rows):
    """Turn the keys of slots `first`, ... of a head to their index."""
    cos, sin = np.empty(turn[PAIRS], np.float64), np.empty(turn[PAIRS], np.float64)
    where = (turn[INDEX], turn[INDEX + 1], turn[INDEX + 2], turn[INDEX + 3])
    for t in range(count):
        _angles(turn, _slot(where, b, h, first + t), cos, sin)
        _turn(rows[t], turn[PAIRS], cos, sin)


@compiled()
def arrive(q, k, waves, parts, rows):
    """Keys to no angle and queries to that of their slot, in place, see `turned.arrived`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        k: keys `[B, H, D]`, likewise.
        waves: cosines and sines fp64 that take back the model's angle, of queries and of keys
            `[B, H, 2, 2, R / 2]`.
        parts, rows: as in `step`.
    """
    batch, group, first = q.shape[0], q.shape[1] // k.shape[1], 0
    for r in range(rows.shape[0]):
        row, turn = rows[r], rows[r, HEADS:]
        pairs, heads, pool = turn[PAIRS], row[2], parts[row[1] - 1]
        cos, sin = np.empty(pairs, np.float64), np.empty(pairs, np.float64)
        for b in range(batch):
            for h in range(heads):
                mine = waves[b, first + h]
                _turn(k[b, first + h], pairs, mine[1, 0], mine[1, 1])
                _angles(turn, turn[BEFORE] + _slots_in_use(pool, b, h, heads), cos, sin)
                for g in range((first + h) * group, (first + h + 1) * group):
                    _turn(q[b, g], pairs, mine[0, 0], mine[0, 1])
                    _turn(q[b, g], pairs, cos, sin)
        first += heads


@compiled()
def turn_back(q, waves):
    """Queries `[B, Hq, D]` by the angles of one position, in place; `waves` `[2, R / 2]` fp64."""
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            _turn(q[b, h], waves.shape[1], waves[0], waves[1])


@compiled()
def add_queries(q, total, outer):
    """Sums of queries and of their products, in place, see `sum_queries.reference`."""
    D = q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            x, sums, first = q[b, h], total[b, h], 0
            for i in range(D):
                sums[i] += x[i]
            if outer.size == 0:
                continue
            for i in range(D):
                row, factor = outer[b, h, first : first + D - i], x[i]
                for j in range(D - i):
                    row[j] += factor * x[i + j]
                first += D - i


@compiled()
def attend(q, parts, heads, turn, scale, softcap, plain, out, lse, received):
    """Attention of one query token, see `decode_attention.reference`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        parts: what is held, a row of integers for each part.
        heads: KV heads.
        turn: how keys are turned.
        scale, softcap: see there; no softcap is 0.
        plain: turn every vector back, instead of the query and the sum of values.
        out: `[B, Hq, Dv]`, zeros.
        lse: `[B, Hq]`.
        received: `[B, H, N]`, or of no size if nobody asks.
    """
    group, kind = q.shape[1] // heads, q.dtype.type
    wide, width = q.shape[2], out.shape[2]
    slots = _slots_of(parts)
    s = np.empty((group, slots), q.dtype)
    rows = np.empty((ROWS, max(wide, width)), q.dtype)
    values = np.empty((ROWS, max(wide, width)), np.float32)
    query, turned = np.empty((group, wide), q.dtype), np.empty((group, wide), q.dtype)
    total = np.empty((group, width), q.dtype)
    for b in range(q.shape[0]):
        for h in range(heads):
            for g in range(group):
                asked = q[b, h * group + g]
                for d in range(wide):
                    query[g, d] = asked[d] * kind(scale)
                for i in range(slots):
                    s[g, i] = -np.inf
            first = 0
            for part in parts:
                side, asks = part[:SIDE], query
                whole = plain or turn[PAIRS] > 0
                if side[BLOCK] and not whole:
                    asks = turned
                    for g in range(group):
                        for d in range(wide):
                            turned[g, d] = query[g, d]
                        hadamard(turned[g], side[BLOCK])
                used = _slots_in_use(part, b, h, heads)
                for start in range(0, used, ROWS):
                    count = min(ROWS, used - start)
                    _read(side, b, h, start, count, whole, values, rows)
                    if turn[PAIRS]:
                        _turn_slots(turn, b, h, first + start, count, rows)
                    _products(asks, rows, count, s, first + start)
                if softcap > 0:  # of slots in use: the others stay at minus infinity
                    for g in range(group):
                        for i in range(first, first + used):
                            s[g, i] = kind(softcap) * math.tanh(s[g, i] / kind(softcap))
                first += part[SLOTS]
            for g in range(group):
                largest, weight = _softmax(s[g])
                lse[b, h * group + g] = largest + math.log(weight) if weight > 0 else -np.inf
                inverse = kind(1) / weight if weight > 0 else kind(0)
                for i in range(slots):
                    s[g, i] *= inverse
            if received.size:
                for i in range(slots):
                    mean = kind(0)
                    for g in range(group):
                        mean += s[g, i]
                    received[b, h, i] = mean / kind(group)
            first = 0
            for part in parts:
                side = part[SIDE : 2 * SIDE]
                for g in range(group):
                    for d in range(width):
                        total[g, d] = 0
                used = _slots_in_use(part, b, h, heads)
                for start in range(0, used, ROWS):
                    count = min(ROWS, used - start)
                    _read(side, b, h, start, count, plain, values, rows)
                    _weigh(s, first + start, rows, count, total)
                for g in range(group):
                    if side[BLOCK] and not plain:
                        hadamard(total[g], side[BLOCK])
                    given = out[b, h * group + g]
                    for d in range(width):
                        given[d] += total[g, d]
                first += part[SLOTS]


# -- storing -----------------------------------------------------------------------------------


@compiled()
def _slot(slots, b, h, i):
    """The `i`-th slot asked for, in one head."""
    address, of_batch, of_head, of_slot = slots
    if address == 0:
        return i
    return carray(_pointer(address + 8 * (b * of_batch + h * of_head + i * of_slot)), 1, np.int64)[
        0
    ]


@compiled()
def _store(new, pool, token, first, heads):
    """Put a token's vectors at its slot of each head, in one side of a pool."""
    size = new.shape[3]
    for b in range(new.shape[0]):
        for h in range(heads):
            at = pool[AT] + b * pool[STRIDE_B] + h * pool[STRIDE_H] + token[b, h] * pool[STRIDE_N]
            row, mine = carray(_pointer(at), size, np.uint8), new[b, first + h, 0]
            for i in range(size):
                row[i] = mine[i]


@compiled()
def _tally(received, row, alpha, keep, used):
    """Add what slots received to a rule's sums, see `tally.reference`."""
    sums_at, of_batch, of_voter, voters, count = row[3], row[4], row[5], row[6], row[7]
    order, held, end, horizon = (row[8], row[9], row[10], row[11]), row[12], row[13], row[14]
    batch, heads, _ = received.shape
    weight = float32(1)
    if alpha != 0 or horizon < 1 << 62:
        weight = float32(float32(used + held) ** alpha) if end - used < horizon else float32(0)
    each = heads // voters
    for b in range(batch):
        for w in range(voters):
            sums = carray(_pointer(sums_at + 4 * (b * of_batch + w * of_voter)), count, np.float32)
            for i in range(count):
                at, total = _slot(order, b, w, i), float32(0)
                for h in range(w * each, (w + 1) * each):
                    total += received[b, h, at]
                sums[i] = sums[i] * keep + total * weight / float32(each)


@compiled()
def step(q, k, v, parts, rows, numbers, scale, softcap, plain, out):
    """One token in all heads of a layer, see `decode_step.reference`.

    Args:
        q: queries `[B, Hq, D]` fp32 or fp64.
        k, v: keys and values of the token `[B, H, 1, bytes]`, in the type of the pools.
        parts: what is held, a row of integers for each part.
        rows: of heads that are alike: their parts, how many they are, their rule's sums, and how
            keys are turned; then `k` and `q` come from `arrive`.
        numbers: of each of `rows`: the power of the slots seen, and the factor on the sums.
        scale, softcap, plain: as in `attend`.
        out: `[B, Hq, Dv]`.
    """
    batch, group, first = q.shape[0], q.shape[1] // k.shape[1], 0
    for r in range(rows.shape[0]):
        row = rows[r]
        mine, heads = parts[row[0] : row[1]], row[2]
        pool = mine[-1]
        lengths = carray(_pointer(pool[LENGTHS]), (batch, heads), np.int32)
        most = 0
        for b in range(batch):
            for h in range(heads):
                most = max(most, lengths[b, h])
        if most < pool[SLOTS]:
            _store(k, pool[:SIDE], lengths, first, heads)
            _store(v, pool[SIDE : 2 * SIDE], lengths, first, heads)
        query = np.empty((batch, heads * group, q.shape[2]), q.dtype)
        mean = np.empty((batch, heads * group, out.shape[2]), q.dtype)
        for b in range(batch):
            for h in range(heads):
                lengths[b, h] += 1
            for g in range(heads * group):
                for d in range(q.shape[2]):
                    query[b, g, d] = q[b, first * group + g, d]
                for d in range(out.shape[2]):
                    mean[b, g, d] = 0
        received = np.empty((batch, heads, _slots_of(mine) if row[3] else 0), q.dtype)
        lse = np.empty((batch, heads * group), q.dtype)
        attend(
            query, mine, heads, row[HEADS:], scale, softcap, plain, mean, lse, received
        )  # fmt: skip
        for b in range(batch):
            for g in range(heads * group):
                for d in range(out.shape[2]):
                    out[b, first * group + g, d] = mean[b, g, d]
        if row[3]:
            _tally(received, row, numbers[r, 0], float32(numbers[r, 1]), lengths[0, 0])
        first += heads


@compiled()
def _halves(x):
    """Vectors `[B, H, D]` fp32, rounded to fp16, as bytes `[B, H, 1, 2 D]`."""
    found = np.empty((x.shape[0], x.shape[1], 1, x.shape[2]), np.uint16)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(x.shape[2]):
                found[b, h, 0, d] = _to_half(x[b, h, d])
    return found.view(np.uint8)


@compiled()
def step_at(q, k, v, out, shape, parts, rows, numbers, scale, softcap):
    """`step` of fp32 numbers at addresses, for pools in fp16: what is asked for each token.

    Arrays would cost the host more than this, where little else is in its caches.

    Args:
        q, k, v, out: addresses of queries, of the token's keys and values, and of the output.
        shape: `(B, H, queries of a KV head, D, Dv)`.
        parts, rows, numbers, scale, softcap: as in `step`.
    """
    batch, heads, group, wide, width = shape
    step(
        carray(_pointer(q), (batch, heads * group, wide), np.float32),
        _halves(carray(_pointer(k), (batch, heads, wide), np.float32)),
        _halves(carray(_pointer(v), (batch, heads, width), np.float32)),
        parts, rows, numbers, scale, softcap, False,
        carray(_pointer(out), (batch, heads * group, width), np.float32),
    )  # fmt: skip


# -- evaluating --------------------------------------------------------------------------------


@compiled()
def _lowest(sums, born, first, last, seen, recent, aged, beta, horizon, keep):
    """The slot of lowest rank among `first` to `last`, of equals the oldest."""
    place, least = -1, np.float32(np.inf)
    for i in range(first, last):
        if recent and born[i] >= seen - recent:
            continue
        rank = sums[i]
        if aged:
            count = np.float32(seen - born[i])
            if keep < 1:
                count = np.float32(horizon - horizon * keep**count)
            elif horizon:
                count = min(count, np.float32(horizon))
            rank /= count if beta == 1 else np.float32(count**beta)
        if place < 0 or rank < least or (rank == least and born[i] < born[place]):
            place, least = i, rank
    return place


@compiled()
def one_by_one(q, new, kept, slots, sums, born, numbers, weight, carry, beta, keep, softcap, out):
    """Tokens into a full cache, each in place of the slot of lowest rank; see `one_by_one.py`.

    Args:
        q: queries `[J, H, G, D]`, scaled.
        new, kept: keys and values as they come, and as their tier keeps them `[J, 2, H, D]`.
        slots: keys and values `[2, H, n + 1, D]`; the last slot is the newest token's.
        sums, born: of slots, of each voter `[V, n + 1]`, fp32 and int64; written to.
        numbers: tokens seen; first and last candidate; recent window that is none, or 0; whether
            sums are forgotten at every token; whether ranks are corrected by age; horizon, or 0.
        weight: of what a slot receives from one query head.
        carry: what is left of a sum after a token.
        beta, keep: of the correction by age; `keep` is below 1 if older votes decay.
        softcap: of products, or 0.
        out: outputs `[J, H, G, D]`, zeros.
    """
    seen, first, last, recent, forgets, aged, horizon = numbers
    heads, group, kind, n = q.shape[1], q.shape[2], q.dtype.type, sums.shape[1] - 1
    share = heads // sums.shape[0]
    s, votes = np.empty((group, n + 1), q.dtype), np.empty(n + 1, q.dtype)
    for j in range(q.shape[0]):
        seen += 1
        for v in range(sums.shape[0]):
            votes[:] = 0
            for h in range(v * share, (v + 1) * share):
                slots[0, h, n], slots[1, h, n] = new[j, 0, h], new[j, 1, h]
                _products(q[j, h], slots[0, h], n + 1, s, 0)
                for g in range(group):
                    row = s[g]
                    if softcap > 0:
                        for i in range(n + 1):
                            row[i] = kind(softcap) * math.tanh(row[i] / kind(softcap))
                    _, total = _softmax(row)
                    inverse = kind(1) / total
                    for i in range(n + 1):
                        row[i] *= inverse
                        votes[i] += row[i]
                _weigh(s, 0, slots[1, h], n + 1, out[j, h])
            mine, ages = sums[v], born[v]
            for i in range(n + 1):
                mine[i] = mine[i] * np.float32(carry) + np.float32(kind(weight) * votes[i])
            place = _lowest(mine, ages, first, last, seen, recent, aged, beta, horizon, keep)
            for h in range(v * share, (v + 1) * share):
                slots[0, h, place], slots[1, h, place] = kept[j, 0, h], kept[j, 1, h]
            ages[place] = seen - 1
            ages[n] = seen
            if not forgets:
                mine[place] = mine[n]
                mine[n] = 0


@compiled()
def _all_inside(slots, batch, heads, n, held):
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                if not 0 <= _slot(slots, b, h, i) < held:
                    return False
    return True


@compiled()
def gather(source, size, held, slots, out):
    """Copy vectors of `size` bytes at `slots` to `out` `[B, H, n, size]`; False if there are none.

    Nothing is written unless every slot is one of the `held`.
    """
    address, of_batch, of_head, of_slot = source
    batch, heads, n, _ = out.shape
    if not _all_inside(slots, batch, heads, n, held):
        return False
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                at = address + b * of_batch + h * of_head + _slot(slots, b, h, i) * of_slot
                row, mine = carray(_pointer(at), size, np.uint8), out[b, h, i]
                for k in range(size):
                    mine[k] = row[k]
    return True


@compiled()
def vectors(side, held, slots, block, out):
    """Vectors at `slots` in fp32, rotated in blocks if `block` is above 0, `[B, H, n, D]`."""
    batch, heads, n, width = out.shape
    if not _all_inside(slots, batch, heads, n, held):
        return False
    for b in range(batch):
        for h in range(heads):
            for i in range(n):
                at = side[AT] + b * side[STRIDE_B] + h * side[STRIDE_H]
                at += _slot(slots, b, h, i) * side[STRIDE_N]
                _copy(side[KIND], at, 0, 1, width, out[b, h, i : i + 1])
                if block:
                    hadamard(out[b, h, i], block)
    return True


@compiled()
def quantize_uniform(x, bits, group, codes, scales):
    """Codes `[M, D]` uint8 and scales `[M, D / group, 2]` of rows fp32, see `Uniform.encode`."""
    top = float32((1 << bits) - 1)
    for m in range(x.shape[0]):
        for start in range(0, x.shape[1], group):
            row, mine = x[m, start : start + group], codes[m, start : start + group]
            low, high = row[0], row[0]
            for i in range(group):
                v = row[i]
                low, high = v if v < low or v != v else low, v if v > high or v != v else high
            numbers = scales[m, start // group]
            numbers[0], numbers[1] = _to_half((high - low) / top), _to_half(low)
            step, zero = _from_half(numbers[0]), _from_half(numbers[1])
            step = float32(1e-8) if step < float32(1e-8) else step
            for i in range(group):
                code = np.rint((row[i] - zero) / step)
                code = float32(0) if code < float32(0) or code != code else min(code, top)
                mine[i] = np.uint8(code)


@compiled()
def pack(codes, bits, packed):
    """Codes `[M, D]` uint8 to bytes `[M, D * bits / 8]`, see `reference._pack`."""
    width = codes.shape[1]
    low = bits - 1 if bits == 3 or bits == 5 else bits
    share, eighth, mask = width * low // 8, width // 8, np.uint8((1 << low) - 1)
    for m in range(codes.shape[0]):
        row, lower, upper = codes[m], packed[m, :share], packed[m, share:]
        packed[m] = 0
        for part in range(8 // low):
            plane, shift = row[part * share : (part + 1) * share], np.uint8(part * low)
            for i in range(share):
                lower[i] |= (plane[i] & mask) << shift
        if low != bits:
            for part in range(8):
                plane = row[part * eighth : (part + 1) * eighth]
                for i in range(eighth):
                    upper[i] |= (plane[i] >> np.uint8(low)) << np.uint8(part)


@compiled()
def dequantize(side, out):
    """Values of packed vectors fp32 `[B, H, N, D]`, turned back if they were rotated."""
    values = np.empty((ROWS, out.shape[3]), np.float32)
    for b in range(out.shape[0]):
        for h in range(out.shape[1]):
            for first in range(0, out.shape[2], ROWS):
                count = min(ROWS, out.shape[2] - first)
                _read(side, b, h, first, count, True, values, out[b, h, first:])


@compiled()
def time_order(pools, out):
    """Index of each slot when pools follow one another, `[M, N]` int64, see `time_order`."""
    n = pools.shape[1]
    for m in range(pools.shape[0]):
        ends = np.zeros(257, np.int64)
        for i in range(n):
            ends[pools[m, i] + 1] += 1
        for i in range(256):
            ends[i + 1] += ends[i]
        for i in range(n):
            out[m, i] = ends[pools[m, i]]
            ends[pools[m, i]] += 1


# -- choosing ----------------------------------------------------------------------------------


@compiled()
def _rising(scores, first, last, newest_first, keys):
    """Integers that rise with `scores[first:last]`; the slot decides between equals."""
    for i in range(last - first):
        positive = np.float32(scores[first + i] + np.float32(0))  # -0.0 + 0.0 is 0.0
        bits = np.int64(np.int32(_bits_of(positive)))
        bits = bits if bits >= 0 else bits ^ 0x7FFFFFFF
        keys[i] = (bits << 30) + (i if newest_first else (1 << 30) - 1 - i)


@compiled()
def _nth(numbers, n):
    """The `n`-th smallest number, from 0; a search that sorts no more than it must (Hoare 1961)."""
    x, low, high = numbers.copy(), 0, len(numbers) - 1
    while low < high:
        pivot, i, j = x[(low + high) // 2], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i, j = i + 1, j - 1
        if j < n < i:
            break
        low, high = (low, j) if n <= j else (i, high)
    return x[n]


@compiled()
def _place(scores, old, kept, numbers, counts, keys, tiers):
    """Tier of every slot that stays, of one voter, see `choose`."""
    _, sinks, recent, fp16_sinks, fp16_recent = numbers
    n, native = len(kept), len(counts)
    rank = np.empty(n, np.float32)
    for i in range(n):
        rank[i] = np.inf if i < sinks or i >= n - recent else scores[kept[i]]
    _rising(rank, 0, n, False, keys)
    for i in range(n):
        held = fp16_sinks <= i < n - fp16_recent
        tiers[i] = native - 1 if held else native
        if not held:
            keys[i] = PLACED
    wanted = np.empty(n, np.int64)
    for tier in range(native - 1):
        if counts[tier] == 0:
            continue
        for i in range(n):
            was = old[kept[i]]
            spoilt = keys[i] > PLACED and was != native and was > tier
            wanted[i] = keys[i] - SPOILT if spoilt else keys[i]
        least = _nth(wanted, n - counts[tier])
        for i in range(n):
            if wanted[i] >= least:
                tiers[i], keys[i] = tier, PLACED
    for i in range(n):
        if i < fp16_sinks or i >= n - fp16_recent:
            tiers[i] = native


@compiled()
def choose(scores, old, numbers, counts, keep, tiers):
    """Who stays, and where, of the slots of each voter, see `choose_slots.reference`.

    Args:
        scores: `[M, N]` fp32.
        old: pools before `[M, N]`.
        numbers: slots dropped, sinks, recent window, and sinks and newest slots in 16 bits.
        counts: slots of each tier.
        keep: slots that stay `[M, N']`, to fill.
        tiers: their pools, or of no size if there are no tiers.
    """
    gone, sinks, recent = numbers[0], numbers[1], numbers[2]
    N = scores.shape[1]
    last = N - recent
    keys = np.empty(N, np.int64)
    for m in range(scores.shape[0]):
        kept = keep[m]
        if gone:
            _rising(scores[m], sinks, last, True, keys)
            among = keys[: last - sinks]
            stay, at = gone < len(among), 0
            least = _nth(among, gone) if stay else np.int64(0)
            for i in range(N):
                if i < sinks or i >= last or (stay and keys[i - sinks] >= least):
                    kept[at] = i
                    at += 1
        else:
            for i in range(N):
                kept[i] = i
        if tiers.size:
            _place(scores[m], old[m], kept, numbers, counts, keys[: len(kept)], tiers[m])
