"""What the references mean, on torch alone, and what `Op` picks where there is no GPU."""

import itertools
import os
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from kvsearch_kernels.choose_slots import Ask, choose_slots
from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.codebooks.gaussian import lloyd_levels
from kvsearch_kernels.codebooks.nearest import nearest_codes
from kvsearch_kernels.decode_step import Heads, Stores, Sums, decode_step
from kvsearch_kernels.evict_in_place import Evictions, evict_in_place
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.op import Op, UnsupportedError
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import (
    Format,
    dequantize_kv,
    fake_quantize,
    quantize,
    quantize_kv,
    reference,
)
from kvsearch_kernels.repack_kv import NewPool, repack_kv
from kvsearch_kernels.rotary import angles, turned
from kvsearch_kernels.scored_attention import scored_attention

OPS = [
    lifetime_attention, scored_attention, quantize_kv, dequantize_kv,
    repack_kv, choose_slots, decode_step, evict_in_place,
]  # fmt: skip
TRITON = [op for op in OPS if "triton" in op.impls]
NEVER = 1 << 40
FMT = Format(4, 64)
WIDTHS = [(bits, levels) for levels, book in CODEBOOKS.items() for bits in book.bits]


def call(op, device="cpu"):
    """Arguments that every implementation could take, but for the device."""
    q, k = (torch.randn(1, h, 6, 64, device=device).half() for h in (4, 2))
    birth = torch.arange(6, device=device)
    lives = (birth, torch.full_like(birth, NEVER))
    weights = torch.ones(6, device=device)
    used = torch.full((1, 2), 3, dtype=torch.int32, device=device)
    packed = quantize(k, FMT)
    parts = [Part(k, k), Part(packed, packed, FMT, FMT)]
    pool = Part(k.clone(), k.clone(), lengths=used)
    sums = Sums(torch.zeros(1, 2, 12, device=device), None, 6, 6, 1.0, None, 1.0)
    stores = Stores([Heads([parts[1], pool], sums)])
    at = {"first_query": 0, "scale": 0.1}
    return {
        "lifetime_attention": ((q, k, k, *lives), at),
        "scored_attention": ((q, k, k, weights), {"scale": 0.1}),
        "quantize_kv": ((k, FMT), {}),
        "dequantize_kv": ((packed, FMT), {}),
        "repack_kv": (
            ([NewPool(birth, parts, 1, (FMT, FMT))],),
            {"dtype": k.dtype, "native": k.dtype},
        ),
        "choose_slots": (([Ask(torch.rand(1, 2, 6, device=device), birth.byte(), 2)],), {}),
        "decode_step": ((q[:, :, 0], k[:, :, :1], k[:, :, :1], stores), {"scale": 0.1}),
        "evict_in_place": (
            (
                torch.stack([k, k]),
                torch.zeros(1, 2, 6, device=device),
                torch.zeros(1, 2, 6, device=device, dtype=torch.long),
                torch.randn(3, 2, 4, 64, device=device).half(),
                *(torch.randn(3, 2, 1, 2, 2, 64, device=device).half() for _ in range(2)),
                torch.ones(2, device=device),
                Evictions(4, 0, 6),
            ),
            {},
        ),
    }[op.name]


@pytest.mark.parametrize("op", TRITON, ids=lambda op: op.name)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="there it runs")
def test_a_name_never_falls_back(op):
    """And `auto` takes no kernel on a CPU, see `test_trust.py`."""
    args, kwargs = call(op)
    with pytest.raises(UnsupportedError, match="one is on cpu"):
        op.run("triton", *args, **kwargs)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_every_implementation_has_the_signature_of_its_reference(op):
    from inspect import signature

    for module in op.impls.values():
        found = import_module(module)
        want = signature(op.reference)
        assert signature(found.forward) == want
        assert signature(found.why_not).parameters == want.parameters


def test_an_op_without_implementations():
    op = Op("nothing", lambda x: x)
    assert op(3) == 3
    with pytest.raises(UnsupportedError, match="triton"):
        op.run("triton", 3)


@pytest.mark.parametrize(("M", "N"), [(1, 1), (63, 64), (65, 65), (10, 1000)])
def test_what_all_keys_received_sums_to_the_row_weights(M, N):
    torch.manual_seed(N)
    q, k = torch.randn(2, 6, M, 64), torch.randn(2, 2, N, 64)
    weights = torch.rand(M)
    _, got = scored_attention.reference(q, k, k, weights, scale=0.125)
    torch.testing.assert_close(got.sum(-1), weights.sum().expand(2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_16_bit_attention_is_that_of_fp32_rounded_once(impl, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, 64).to(dtype) * 3 for h in (6, 2, 2))
    birth, death = torch.arange(40), torch.arange(40) + 9
    args = {"first_query": 3, "scale": 0.125}
    out, lse = lifetime_attention.run(impl, q, k, v, birth, death, **args)
    want = lifetime_attention.run(impl, *(x.float() for x in (q, k, v)), birth, death, **args)
    assert torch.equal(out, want[0].to(dtype))
    assert torch.equal(lse, want[1])
    # each row's probabilities, over values of 1
    ones = lifetime_attention.run(impl, q, k, torch.ones_like(v), birth, death, **args)[0]
    assert ones.sub(1).abs().max() <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_received_attention_of_16_bit_queries_is_summed_in_fp32(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 30, 64).to(dtype), torch.randn(1, 2, 30, 64).to(dtype)
    weights = torch.full((30,), 30_000.0)  # visible keys of long contexts: fp16 ends at 65504
    out, received = scored_attention.reference(q, k, k, weights, scale=0.125)
    assert out.dtype is dtype
    want = scored_attention.reference(q.float(), k.float(), k.float(), weights, scale=0.125)
    assert torch.equal(out, want[0].to(dtype))
    assert torch.equal(received, want[1])
    torch.testing.assert_close(received.sum(-1), weights.sum().expand(1, 2))


@pytest.mark.parametrize("shape", [(2, 3, 70, 64), (5, 96), (1, 128)])
@pytest.mark.parametrize(("bits", "levels"), WIDTHS)
def test_the_fast_fake_quantisation_is_the_reference_bit_for_bit(shape, bits, levels):
    x = torch.randn(shape) * torch.rand(*shape[:-1], 1) * 5
    x[0, 0] = 0
    for y in (x, x.double(), x.transpose(0, -2)):
        groups = (CODEBOOKS[levels].group or shape[-1], 32)
        for rotate, group in itertools.product((False, True), groups):
            fmt = Format(bits, group, levels, rotate)
            assert torch.equal(fake_quantize(y, fmt), reference.fake_quantize(y, fmt))


@pytest.mark.parametrize("bits", [8, 5, 4, 3, 2, 1])
def test_the_grid_rounds_as_a_search_does_on_and_around_every_edge(bits):
    levels = lloyd_levels(bits)
    edges = (levels[1:] + levels[:-1]) / 2
    around = [torch.nextafter(edges, edges + s) for s in (-1, 1)]
    odd = torch.tensor([-torch.inf, torch.inf, torch.nan])
    z = torch.cat([edges, *around, torch.linspace(-9, 9, 100001), odd])
    assert torch.equal(nearest_codes(z, bits).long(), torch.bucketize(z, edges))


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("first", [0, 3, 11])
def test_anchors_are_isolated_as_anllm_says(impl, first):
    T, marks = 12, (2, 5, 6, 11)
    q, k, v = (torch.randn(1, 2, n, 64) for n in (T - first, T, T))
    sequence = torch.tensor([sum(a < j for a in marks) for j in range(T)])
    is_anchor = torch.tensor([j in marks for j in range(T)])
    i, j = torch.arange(first, T).unsqueeze(-1), torch.arange(T)
    # equation 4 with its condition read as the paper's prose: an anchor row sees no other anchor
    seen = (j <= i) & ((sequence == sequence[i]) | (is_anchor & ~is_anchor[i]))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.1)
    ends = torch.tensor([next((a for a in marks if a >= t), NEVER) for t in range(T)])
    args = {"first_query": first, "scale": 0.1, "anchors": torch.where(is_anchor, j, -1)}
    death = torch.where(is_anchor, NEVER, ends + 1)
    out, lse = lifetime_attention.run(impl, q, k, v, j, death, **args)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, lifetime_attention.reference(q, k, v, j, death, **args)[1])


@pytest.mark.parametrize(("bits", "levels"), WIDTHS)
@pytest.mark.parametrize("rotate", [False, True])
def test_packing_and_unpacking_is_fake_quantisation_bit_for_bit(bits, levels, rotate):
    x = torch.randn(1, 2, 33, 64)
    fmt = Format(bits, 32, levels, rotate)
    packed = quantize_kv.reference(x, fmt)
    assert torch.equal(dequantize_kv.reference(packed, fmt), fake_quantize(x, fmt))


def test_decoding_equals_attention_over_what_is_read_back():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 64), torch.randn(2, 2, 30, 64), torch.randn(2, 2, 30, 64)
    fmt = Format(4, 64, "lloyd", True)
    pool = Part(*(x[:, :, :10].clone() for x in (k, v)),
                lengths=torch.full((2, 2), 9, dtype=torch.int32))  # fmt: skip
    tier = Part(quantize(k[:, :, 10:], fmt), quantize(v[:, :, 10:], fmt), fmt, fmt)
    new = (x[:, :, 9:10] for x in (k, v))
    out = decode_step.reference(q, *new, Stores([Heads([tier, pool])]), scale=0.125)
    kk, vv = (torch.cat([x[:, :, :10], fake_quantize(x[:, :, 10:], fmt)], 2) for x in (k, v))
    birth, death = torch.zeros(30, dtype=torch.long), torch.full((30,), NEVER)
    want = lifetime_attention.reference(
        q.unsqueeze(2), kk, vv, birth, death, first_query=0, scale=0.125
    )
    torch.testing.assert_close(out, want[0].squeeze(2))


def test_what_a_slot_received_is_what_scored_attention_says():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 64), torch.randn(2, 2, 30, 64), torch.randn(2, 2, 30, 64)
    pool = Part(*(x[:, :, 10:-1].contiguous() for x in (k, v)))
    pool = Part(*(torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (pool.keys, pool.values)),
                lengths=torch.full((2, 2), 19, dtype=torch.int32))  # fmt: skip
    sums = Sums(torch.zeros(2, 2, 30), None, 10, 20, 0.0, None, 1.0)
    stores = Stores([Heads([Part(k[:, :, :10], v[:, :, :10]), pool], sums)])
    new = (x[:, :, -1:] for x in (k, v))
    out = decode_step.reference(q, *new, stores, scale=0.125, softcap=7.0)
    one = torch.ones(1)
    want = scored_attention.reference(q.unsqueeze(2), k, v, one, scale=0.125, softcap=7.0)
    torch.testing.assert_close(out, want[0].squeeze(2))
    torch.testing.assert_close(sums.sums, want[1])


@pytest.mark.parametrize("bad", [-1, 12, 1 << 40])
def test_bad_slots_are_found_on_request(bad, monkeypatch):
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    ((pool,),), types = call(repack_kv)
    slots = torch.tensor([0, bad])
    with pytest.raises(IndexError, match=f"slot {bad} is out of range, there are 12"):
        repack_kv([replace(pool, source=slots)], **types)
    repack_kv([replace(pool, source=slots[:1])], **types)


@pytest.mark.parametrize("bad", [-1, 7])
def test_bad_lengths_are_found_on_request(bad, monkeypatch):
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    (*qkv, stores), kwargs = call(decode_step)
    for i in range(2):
        used = [torch.tensor([[5, bad if i == j else 0]], dtype=torch.int32) for j in range(2)]
        held = zip(stores.heads[0].parts, used, strict=True)
        parts = [replace(part, lengths=n) for part, n in held]
        with pytest.raises(IndexError, match=f"lengths of part {i} must be in 0 to 6.*{bad}"):
            decode_step(*qkv, Stores([Heads(parts)]), **kwargs)


def test_turning_by_nothing_is_a_copy_and_there_and_back_is_close():
    x = torch.randn(1, 2, 8, 64)
    every = torch.arange(8)
    inv_freq = 10000.0 ** (-torch.arange(16) / 16)

    def by(positions, y):
        return turned(y, *angles(positions, inv_freq, torch.float32))

    assert torch.equal(by(torch.zeros(8), x), x)
    there = by(every * 9, x)
    back = by(every * -9, there)
    torch.testing.assert_close(back, x)
    assert torch.equal(there[..., 32:], x[..., 32:])


def test_a_tier_prefers_what_was_never_rounded_further_whatever_the_sign_of_scores():
    scores = torch.tensor([[[-5.0, 3.0, -1.0, 2.0]]])
    before = torch.tensor([0, 1, 2, 1], dtype=torch.uint8)  # the third is in 16 bits
    (choice,) = choose_slots([Ask(scores, before, 0, counts=(3, 1))])
    pools = choice.pools
    assert pools.tolist() == [[[0, 0, 0, 1]]]
