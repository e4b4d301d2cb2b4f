# mypy: ignore-errors
"""Kernel of `sum_queries`."""

import triton
import triton.language as tl

from kvsearch_kernels.decode_step.turn_kernels import back


@triton.jit(do_not_specialize=["H", "skip"])
def add_queries(
    q, freq, lengths, ahead, total, outer, sqb, sqh, H, skip, D: tl.constexpr,
    HALF: tl.constexpr, PRODUCTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, r): ROWS rows of the products of query head i; the first adds the query too."""
    bh = tl.program_id(0).to(tl.int64)
    at = tl.load(lengths) + tl.load(ahead)
    count = tl.where(at >= skip, D, 0)  # channels, or none of a token that is left out
    kind: tl.constexpr = q.dtype.element_ty
    mine = q + (bh // H) * sqb + (bh % H) * sqh
    d = tl.arange(0, D)
    x = back(mine, freq, at, d, HALF, kind)
    to = total + bh * D + d
    adds = d < tl.where(tl.program_id(1) == 0, count, 0)
    tl.store(to, tl.load(to, mask=adds, other=0.0) + x, mask=adds)
    if PRODUCTS:
        i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        rows = back(mine, freq, at, i, HALF, kind)
        upper = (d[None, :] >= i[:, None]) & (d < count)[None, :]
        place = outer + bh * (D * (D + 1) // 2) + i[:, None] * (2 * D - i[:, None] - 1) // 2
        before = tl.load(place + d[None, :], mask=upper, other=0.0)
        tl.store(place + d[None, :], before + rows[:, None] * x[None, :], mask=upper)
