# mypy: ignore-errors
"""Kernel of `tally`."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["V", "EACH", "held", "end", "horizon"])
def add(
    sums, received, order, lengths, sb, sv, ob, oh, on, N, V, EACH, held, end, horizon, alpha, keep,
    POWER: tl.constexpr, WINDOW: tl.constexpr, DECAY: tl.constexpr, ORDER: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """One program: BN slots of one voter, who speaks for EACH heads. POWER 2 is any power."""
    voter = tl.program_id(1).to(tl.int64)
    b = voter // V
    v = voter % V
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = n < N
    used = tl.load(lengths)
    weight = 1.0
    if POWER == 1:
        weight = (held + used).to(tl.float32)
    if POWER == 2:
        weight = tl.exp2(alpha * tl.log2((held + used).to(tl.float32)))
    if WINDOW:
        weight = tl.where(end - used < horizon, weight, 0.0)
    total = tl.zeros([BN], tl.float32)
    for i in range(0, EACH):
        h = v * EACH + i
        at = n
        if ORDER:
            at = tl.load(order + b * ob + h * oh + n * on, mask=inside, other=0)
        row = received + (b * V * EACH + h) * N
        total += tl.load(row + at, mask=inside, other=0.0)
    to = sums + b * sb + v * sv + n
    before = tl.load(to, mask=inside, other=0.0)
    if DECAY:
        before *= keep
    tl.store(to, before + total * (weight / EACH), mask=inside)
