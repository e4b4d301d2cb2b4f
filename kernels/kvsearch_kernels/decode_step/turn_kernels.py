# mypy: ignore-errors
"""Kernel of `decode_step` that turns keys which carry no angle, and the query that meets them."""

import triton
import triton.language as tl

from kvsearch_kernels.address_kernels import pointer
from kvsearch_kernels.repack_kv.triton_kernels import take

TURN = tl.constexpr(4)  # columns of `turns` without its parts, and of each of these
PART = tl.constexpr(5)


@triton.jit
def _wave(angle):
    """Cosine and sine in fp32 of fp64 angles, which may be many turns.

    Quarter turns are taken off in three pieces that are numbers of fp32 too, to which Triton may
    round what is written here; products of the first two with a number of quarters are exact. The
    polynomials are those of Cephes (Moshier, 1992). CUDA's own have a case for large angles that
    needs memory in every thread.
    """
    quarters = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = angle - quarters * 1.5703125
    rest = rest - quarters * 0.0004838267923332751
    x = (rest - quarters * 2.563344151594519e-12).to(tl.float32)
    z = x * x
    s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z
    c = c - 0.5 * z + 1.0
    quadrant = quarters.to(tl.int32)
    odd = (quadrant & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    cos = tl.where(((quadrant + 1) & 2) != 0, -cos, cos)
    return cos, tl.where((quadrant & 2) != 0, -sin, sin)


@triton.jit
def _pairs(freq, d, HALF: tl.constexpr):
    """Angle of one position of channels `d`, 0 of those that do not turn; and partners."""
    angle = tl.load(freq + d % HALF, mask=d < 2 * HALF, other=0.0)
    return angle, tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))


@triton.jit
def _mix(x, partner, cos, sin, d, HALF: tl.constexpr):
    return x * cos + tl.where(d < HALF, -sin, sin) * partner


@triton.jit
def back(x, freq, stream, d, HALF: tl.constexpr, kind: tl.constexpr):
    """A vector at `x`, without the angle that the model gave it at position `stream`, as fp32.

    The model's products are in fp32, its cosines and sines, and what comes out, in the type `kind`.
    `freq`: angle of one position of each of the HALF pairs.
    """
    angle, other = _pairs(freq, d, HALF)
    cos, sin = _wave((stream.to(tl.float32) * angle).to(tl.float64))
    cos = cos.to(kind).to(tl.float32)
    sin = -sin.to(kind).to(tl.float32)
    values = tl.load(x + d).to(tl.float32)
    found = _mix(values, tl.load(x + other).to(tl.float32), cos, sin, d, HALF)
    return found.to(kind).to(tl.float32)


@triton.jit(do_not_specialize=["G"])
def turn_heads(
    q, rotated, turned, like, heads, turns, levels, G, D: tl.constexpr, HEAD: tl.constexpr,
    COLUMNS: tl.constexpr, HELD: tl.constexpr, HALF: tl.constexpr, FORMATS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """Program (i, g), g below G: query g of KV head i, turned to the slot of the newest token.

    Program (i, G + j): the j-th BT keys of KV head i, unpacked and turned to the index of their
    slots. `FORMATS` are those of keys, as in `repack_kv`; `like` has the type of the pools.
    """
    bh = tl.program_id(0).to(tl.int64)
    row = heads + bh * HEAD
    turn = turns + bh * COLUMNS
    d = tl.arange(0, D)
    angles = pointer(turn, tl.float32, 4)
    freq, other = _pairs(angles, d, HALF)
    if tl.program_id(1) < G:
        used = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.int32))).to(tl.int64)
        slot = tl.load(turn + 2) + used - 1
        kind: tl.constexpr = q.dtype.element_ty
        mine = (bh * G + tl.program_id(1)) * D
        query = back(q + mine, angles, slot + tl.load(turn + 3), d, HALF, kind)
        c, s = _wave(slot.to(tl.float64) * freq.to(tl.float64))
        query = _mix(query, tl.gather(query, other, 0), c, s, d, HALF)
        tl.store(rotated + mine + d, query.to(kind))
    else:
        n = tl.load(row + 7)
        to = (tl.program_id(1) - G).to(tl.int64) * BT + tl.arange(0, BT)
        inside = to < n
        keys = tl.zeros([BT, D], tl.float32)
        for p in tl.static_range(HELD):
            part = turn + TURN + p * PART
            keys = take(keys, part, levels, turned, like, to, inside, D, FORMATS, BT)
        index = tl.load(turn + 1)
        numbered = to < tl.where(index != 0, n, 0)
        given = tl.load(index.to(tl.pointer_type(tl.int64)) + to, mask=numbered, other=0)
        at = tl.where(numbered, given, to)
        cos, sin = _wave(at.to(tl.float64)[:, None] * freq.to(tl.float64)[None, :])
        partner = tl.gather(keys, tl.broadcast_to(other[None, :], [BT, D]), 1)
        keys = _mix(keys, partner, cos, sin, d[None, :], HALF)
        place = turned + (tl.load(row + 6) // G + to)[:, None] * D + d[None, :]
        tl.store(place, keys.to(turned.dtype.element_ty), mask=inside[:, None])
