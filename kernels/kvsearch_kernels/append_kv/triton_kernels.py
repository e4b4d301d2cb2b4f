# mypy: ignore-errors
"""Kernel of `append_kv`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["C", "M"])
def append(
    keys, values, lengths, k, v, skb, skh, skm, svb, svh, svm, H, C, M,
    D: tl.constexpr, PAD: tl.constexpr, DV: tl.constexpr, PADV: tl.constexpr,
):  # fmt: skip
    """One program: all new tokens of one head, which alone reads and writes that head's length."""
    bh = tl.program_id(0).to(tl.int64)
    b = bh // H
    h = bh % H
    used = tl.load(lengths + bh)
    d = tl.arange(0, PAD)
    e = tl.arange(0, PADV)
    for m in range(0, M):
        fits = tl.where(used + m < C, 1, 0)  # no channel of a token without room
        row = bh * C + used + m
        key = tl.load(k + b * skb + h * skh + m * skm + d, mask=d < D, other=0.0)
        tl.store(keys + row * D + d, key.to(keys.dtype.element_ty), mask=d < D * fits)
        value = tl.load(v + b * svb + h * svh + m * svm + e, mask=e < DV, other=0.0)
        tl.store(values + row * DV + e, value.to(values.dtype.element_ty), mask=e < DV * fits)
    tl.debug_barrier()  # no thread may still have to read the length
    tl.store(lengths + bh, used + M)
