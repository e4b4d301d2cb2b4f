# mypy: ignore-errors
"""Kernel of `lifetime_attention`: FlashAttention-2 over the key blocks alive for a query block."""

import triton
import triton.language as tl


@triton.jit
def soften(s, scale, cap, HAS_CAP: tl.constexpr):
    """Scores in bits: `scale` holds log2(e); with a cap, `cap * tanh(x / cap)` in bits."""
    if HAS_CAP:
        # 2 sigmoid(2x) - 1 = tanh(x); the interpreter has no tanh
        x = s * (scale / cap)
        t = 1.0 - 2.0 / (1.0 + tl.exp2(2.8853900817779268 * x))
        return t * (cap * 1.4426950408889634)
    else:
        return s * (scale * 1.4426950408889634)


@triton.jit
def _blocks(
    acc, total, top, q, k, v, birth, death, anchors, alone, table, lo, hi, rows, E, sk, sv, scale,
    cap, D: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr, ISOLATE: tl.constexpr,
):  # fmt: skip
    """Attend over the key blocks `table[lo:hi]`; without MASKED every row sees all their keys."""
    cols = tl.arange(0, BN)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    for i in range(lo, hi):
        first = tl.load(table + i) * BN
        k_at = k + first.to(tl.int64) * sk + cols[None, :] * sk + d[:, None]
        v_at = v + first.to(tl.int64) * sv + cols[:, None] * sv + dv[None, :]
        if MASKED:
            there = first + cols < E
            kt = tl.load(k_at, mask=there[None, :], other=0.0)
        else:
            kt = tl.load(k_at)
        s = soften(tl.dot(q, kt, input_precision="ieee"), scale, cap, HAS_CAP)
        if MASKED:
            born = tl.load(birth + first + cols, mask=there, other=2147483647)
            dies = tl.load(death + first + cols, mask=there, other=-2147483647)
            seen = (born[None, :] <= rows[:, None]) & (rows[:, None] < dies[None, :])
            if ISOLATE:
                anchor = tl.load(anchors + first + cols, mask=there, other=-1)
                earlier = (anchor >= 0)[None, :] & (anchor[None, :] < rows[:, None])
                seen = seen & ~(earlier & alone[:, None])
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        if MASKED:
            vt = tl.load(v_at, mask=there[:, None], other=0.0)
        else:
            vt = tl.load(v_at)
        acc = tl.dot(p.to(vt.dtype), vt, acc * shrink[:, None], input_precision="ieee")
        top = higher
    return acc, total, top


@triton.jit(do_not_specialize=["first_query", "M", "E"])
def attend(
    q, k, v, birth, death, anchors, isolated, table, counts, out, lse,
    sqb, sqh, sqm, skb, skh, ske, svb, svh, sve,
    M, E, first_query, Hq, G, width, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_CAP: tl.constexpr, ISOLATE: tl.constexpr,
):  # fmt: skip
    """One program: BM query rows of one head.

    `table[block]` lists key blocks: first `counts[block, 0]` that every row sees whole, then up to
    `counts[block, 1]` that need the mask. `out` and `lse` are contiguous. With ISOLATE, rows whose
    flag in `isolated` is set see no earlier key that `anchors` gives a token index.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows start first
    bh = tl.program_id(1)
    b = (bh // Hq).to(tl.int64)
    h = (bh % Hq).to(tl.int64)
    q += b * sqb + h * sqh
    k += b * skb + (h // G) * skh
    v += b * svb + (h // G) * svh
    local = block * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    inside = local < M
    start = block.to(tl.int64) * BM
    r = tl.arange(0, BM)
    q_at = q + start * sqm + r[:, None] * sqm + d[None, :]
    qt = tl.load(q_at, mask=inside[:, None], other=0.0)
    full = tl.load(counts + 2 * block)
    alive = tl.load(counts + 2 * block + 1)
    table += block.to(tl.int64) * width
    acc = tl.zeros([BM, DV], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    rows = first_query + local
    alone = inside
    if ISOLATE:
        alone = tl.load(isolated + local, mask=inside, other=0) != 0
    acc, total, top = _blocks(
        acc, total, top, qt, k, v, birth, death, anchors, alone, table, 0, full, rows, E, ske, sve,
        scale, cap, D, DV, BN, False, HAS_CAP, ISOLATE,
    )  # fmt: skip
    acc, total, top = _blocks(
        acc, total, top, qt, k, v, birth, death, anchors, alone, table, full, alive, rows, E, ske,
        sve, scale, cap, D, DV, BN, True, HAS_CAP, ISOLATE,
    )  # fmt: skip
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    out += (bh.to(tl.int64) * M + start) * DV
    lse += bh.to(tl.int64) * M + start
    out_at = out + r[:, None] * DV + dv[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside[:, None])
    bits = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(lse + r, bits * 0.6931471805599453, mask=inside)
