# mypy: ignore-errors
"""Second kernel of `scored_decode`: from products to what each slot received."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["G"])
def receive(products, lse, received, width, G, BN: tl.constexpr):
    """One program: BN slots of one KV head.

    `products` `[B * H, G, width]` in bits, `lse` `[B * H, G]` natural, `received` `[B * H, width]`.
    """
    bh = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    inside = n < width
    total = tl.zeros([BN], tl.float32)
    for g in range(0, G):
        norm = tl.load(lse + bh * G + g) * 1.4426950408889634
        norm = tl.where(norm == float("-inf"), 0.0, norm)  # nothing in use: -inf - -inf is NaN
        s = tl.load(products + (bh * G + g) * width + n, mask=inside, other=float("-inf"))
        total += tl.exp2(s - norm)
    tl.store(received + bh * width + n, total / G, mask=inside)
