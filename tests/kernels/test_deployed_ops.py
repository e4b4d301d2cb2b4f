"""The deployed cache asks the ops for attention, scores, packing and compaction, and notes it."""

import numpy as np
import pytest
import torch

from kvsearch.cache.engine import advance
from kvsearch.cache.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.policy import ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention
from kvsearch_kernels.configs import COPY_BYTES
from kvsearch_kernels.copy_rows import Copy, triton_impl
from kvsearch_kernels.launch import ceil_div

SHAPE = ModelShape(1, 2, 16, 6)
TIERS = (
    Tier(share=0.2),
    Tier(share=0.4, key_bits=8, value_bits=4),
    Tier(share=0.4, key_bits=3, value_bits=2),
)
Q = Quantizer(group=8, rotate=True, levels="lloyd", fp16_sinks=True)
BASE = {"gather_rows", "lifetime_attention", "decode_attention"}
PACKS = {"quantize_kv", "dequantize_kv", "gather_kv"}  # the last fills tiers from a prompt
SCORES = {"scored_attention", "scored_decode", "gather_rows"}
POLICIES = {
    "window": (Policy(slots=16, sinks=2, interval=3), BASE),
    "tiers by age": (Policy(slots=20, sinks=2, interval=3, tiers=TIERS, quantizer=Q), BASE | PACKS),
    "scores": (Policy(slots=16, recent_window=3, interval=2, rule=Attention(beta=1)), SCORES),
    "tiers by score": (
        Policy(slots=20, sinks=2, interval=3, tiers=TIERS, quantizer=Q, rule=Attention()),
        SCORES | PACKS,
    ),
    "re-indexed": (
        Policy(slots=20, interval=4, positions="cache", tiers=TIERS, quantizer=Q),
        BASE | PACKS,
    ),
}


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("name", POLICIES)
def test_decoding_is_attention_over_what_is_read_back(name, softcap):
    policy, ops = POLICIES[name]
    rotary = Rotary(100.0 ** (-torch.arange(8) / 8))
    packed, plain = (
        LayerState(layout(policy, SHAPE).layers[0], packed=True, rotary=rotary, fast=fast)
        for fast in (True, False)
    )
    torch.manual_seed(0)
    for m in (24, *[1] * 9):
        qkv = [torch.randn(2, h, m, 16, dtype=torch.float64) for h in (6, 2, 2)]
        got = advance(packed, *qkv, scale=0.3, softcap=softcap)
        plain.packed = False  # takes the path of many tokens over what `read` unpacks
        want = advance(plain, *qkv, scale=0.3, softcap=softcap)
        assert (got - want).abs().max() < 1e-12
        if packed.scorer is not None and plain.scorer is not None:
            torch.testing.assert_close(packed.scorer.sums, plain.scorer.sums)
    # which only some parts need, and only rules
    assert set(packed.impls) - {"time_order", "choose_slots", "copy_rows"} == ops
    ways = {
        "reference",
        "torch",
        "numba",
        "slices",
        "inplace",
    }  # the last one of a prompt's scored_attention
    assert set(packed.impls.values()) <= ways
    assert packed.nbytes == plain.nbytes


def test_few_programs_of_a_copy_find_nothing_to_do():
    """A grid is as wide as its longest run; codes of all heads are one, beside each head's pool.

    Here for 8 sequences, 32 heads and 1024 slots of 4 bits, as the benchmark copies them.
    """
    B, H, n, D = 8, 32, 1024, 128
    codes, scales = ((B, H, n, D // 2), torch.uint8), ((B, H, n, 1, 2), torch.float16)
    copies = [
        Copy(*(torch.empty(shape, dtype=dtype) for _ in range(2)))
        for shape, dtype in (codes, scales) * 2
    ]
    for _ in range(2):
        pool = torch.empty(B, H, n + 32, D, dtype=torch.float16)
        copies.append(Copy(pool[:, :, : n + 16], torch.empty(B, H, n + 16, D, dtype=pool.dtype)))
    sizes = np.concatenate([triton_impl._rows(copy) for copy in copies])[:, 2]
    assert sizes.sum() == sum(copy.to.nbytes for copy in copies)
    assert len(sizes) == sum(map(triton_impl._count, copies))
    programs = ceil_div(int(sizes.max()), COPY_BYTES) * len(sizes)
    useful = sum(ceil_div(int(size), COPY_BYTES) for size in sizes)
    print(f"{programs} programs, {useful} of which copy")
    assert programs < 2 * useful
