# mypy: ignore-errors
"""Second kernel of `scored_attention`: one program per block of keys, so there are no atomics."""

import triton
import triton.language as tl

from kvsearch_kernels.lifetime_attention.triton_kernels import soften


@triton.jit(do_not_specialize=["first_query", "M", "E"])
def score(
    q, k, lse, weights, birth, death, out,
    sqb, sqh, sqm, skb, skh, ske,
    M, E, first_query, H, G, scale, cap,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """One program: BN keys of one KV head, against all rows of its G query heads.

    Keys are the rows of the tile, so that summing over queries stays inside a thread until the
    end. `lse` `[B, Hq, M]` and `out` `[B, H, E]` are contiguous.
    """
    bh = tl.program_id(1)
    b = (bh // H).to(tl.int64)
    h = (bh % H).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BN
    n = tl.arange(0, BN)
    r = tl.arange(0, BM)
    d = tl.arange(0, D)
    there = first + n < E
    born = tl.load(birth + first + n, mask=there, other=2147483647)
    dies = tl.load(death + first + n, mask=there, other=-2147483647)
    # int64: "never" minus first_query must not wrap
    low = tl.maximum(tl.min(born, 0).to(tl.int64) - first_query, 0)
    high = tl.minimum(tl.max(dies, 0).to(tl.int64) - first_query, M)
    begin = (tl.minimum(low, M) // BM * BM).to(tl.int32)
    end = high.to(tl.int32)
    k_at = k + b * skb + h * skh + first * ske + n[:, None] * ske + d[None, :]
    keys = tl.load(k_at, mask=there[:, None], other=0.0)
    parts = tl.zeros([BN, BM], tl.float32)
    for g in range(0, G):
        head = h * G + g
        q_head = q + b * sqb + head * sqh
        lse_head = lse + (b * H * G + head) * M
        for start in range(begin, end, BM):
            inside = start + r < M
            q_at = q_head + tl.cast(start, tl.int64) * sqm + r[None, :] * sqm + d[:, None]
            qt = tl.load(q_at, mask=inside[None, :], other=0.0)
            s = soften(tl.dot(keys, qt, input_precision="ieee"), scale, cap, HAS_CAP)
            norm = tl.load(lse_head + start + r, mask=inside, other=0.0) * 1.4426950408889634
            weight = tl.load(weights + start + r, mask=inside, other=0.0)
            rows = first_query + start + r
            seen = (born[:, None] <= rows[None, :]) & (rows[None, :] < dies[:, None])
            seen = seen & inside[None, :]
            # the mask goes into the exponent: a row that sees nothing has lse = -inf
            p = tl.exp2(tl.where(seen, s - norm[None, :], float("-inf")))
            parts += p * weight[None, :]
    received = tl.sum(parts, 1)
    tl.store(out + bh.to(tl.int64) * E + first + n, received / G, mask=there)
