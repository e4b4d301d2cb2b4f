"""A decoded token in all stores of a layer at once, on the kernels alone."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from kernel_tools import arena, close, poisoned
from step_policies import POLICIES

from kvsearch.cache.layer import empty_layers
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.policy import ModelShape
from kvsearch_kernels.decode_step import Heads, Stores, Sums, Turned, decode_step
from kvsearch_kernels.decode_step.probe import plainly
from kvsearch_kernels.decode_step.table import key_kinds_of, kinds_of, placed
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, Packed, quantize

D, F16, F32 = 64, torch.float16, torch.float32
SHAPE = ModelShape(1, 3, D, 6)


def replay(policy, dtype):
    draw = torch.Generator().manual_seed(0)
    rotary = Rotary(100.0 ** (-torch.arange(D // 2) / (D // 2)))
    (layer,) = empty_layers(policy, SHAPE, [rotary], packed=True)
    outs = []
    for m in (26, *[1] * 5):  # of which one or two compact
        q, k, v = (torch.randn(1, h, m, D, generator=draw).to(dtype) for h in (6, 3, 3))
        outs.append(advance(layer, q, k, v, scale=0.2).clone())
    return torch.cat(outs, 2), layer


# fp16 rounding may change which token is dropped, and all that follows: scores are run in fp32
CASES = [(name, F32 if p.active_rule else F16) for name, p in POLICIES.items()]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_layer_decodes_on_one_set_of_launches(name, dtype, kernels_alone):
    policy = POLICIES[name]
    want, plain = replay(policy, dtype)
    assert len(plain.groups) == (1 if name == "full" else 3)

    along = policy.quantizer.along == "tokens"  # which only reading has a kernel for
    kernels_alone(*(["quantize_kv"] if along else []))
    got, layer = replay(policy, dtype)
    assert layer.impls["decode_step"] == "triton"
    room = 4e-3 if dtype is F16 else 1e-5
    torch.testing.assert_close(got, want, rtol=room, atol=room)
    assert layer.peak_bytes == plain.peak_bytes
    for a, b in zip(layer.groups, plain.groups, strict=True):
        assert (a.nbytes, a.peak) == (b.nbytes, b.peak)
        for what in ("sums", "total", "outer"):
            if hasattr(a.scorer, what):
                sums = (getattr(x.scorer, what) for x in (a, b))
                torch.testing.assert_close(*sums, rtol=1e-4, atol=1e-5)


FORMATS = {
    0: (),
    1: ((Format(4, 64), Format(4, 64), 133),),
    2: ((Format(5, 64, "lloyd", True), Format(4, 64, "lloyd", True), 67),
        (Format(3, 32), Format(1, 64), 1), (Format(8, 64, "lloyd", True), Format(2, 64), 40)),
}  # fmt: skip


def held(x, fmt):
    if fmt is None:
        return arena(x)
    packed = quantize(x, fmt)
    return Packed(arena(packed.codes), arena(packed.scales))


def layer(dtype, *, votes=True, turns=False, B=2, room=9, used=4, most=200):
    """Stores of 1, 2 and 1 KV heads, the first of which has no tier; the token that comes.

    Tiers have at most so many slots. With `turns`, keys carry no angle; of 64 channels 40 turn, in
    the second store by angles of each head, and the stream is long.
    """
    torch.manual_seed(0)
    stores = []
    for i, heads in enumerate((1, 2, 1)):
        parts, N = [], room
        for key, value, n in FORMATS[i]:
            n = min(n, most)
            k, v = (torch.randn(B, heads, n, D).to(dtype) for _ in "kv")
            lengths = arena(torch.randint(0, n + 1, (B, heads)).int())
            parts.append(Part(held(k, key), held(v, value), key, value, lengths))
            N += n
        k, v = (torch.randn(B, heads, room, D).to(dtype) for _ in "kv")
        parts.append(Part(arena(k), arena(v), lengths=torch.full((B, heads), used).int()))
        order = torch.stack([torch.randperm(N) for _ in range(B * heads)]).view(B, heads, N)
        sums = Sums(arena(torch.rand(B, heads, N)), order if i else None, N - room, room, 0.5,
                    7 if i else None, 0.9)  # fmt: skip
        how = None
        if turns:
            freq = 1000.0 ** (-torch.arange(20) / 20)
            freq = torch.stack([freq, freq.flip(0)]) if heads > 1 else freq
            how = Turned(arena(freq), arena(order) if i else None, N - room, 90_000 + i)
        stores.append(Heads(parts, sums if votes else None, how))
    q = torch.randn(B, 12, D).to(dtype)
    k, v = (torch.randn(B, 1, 4, D).to(dtype).transpose(1, 2) for _ in "kv")
    return q, k, v, Stores(stores)


@pytest.mark.parametrize(
    ("votes", "dtype", "more", "turns"),
    [(True, F32, {"scale": 0.125}, False), (False, F16, {"scale": 0.3, "softcap": 3.0}, True)],
)
def test_every_store_is_served(votes, dtype, more, turns):
    q, k, v, got = layer(dtype, votes=votes, turns=turns)
    with poisoned():
        out = decode_step.run("triton", q, k, v, got, **more)
    yard, exact = (layer(dtype, votes=votes, turns=turns)[-1] for _ in range(2))
    eager = plainly(q, k, v, yard, **more)
    close(out, eager, decode_step.reference(q.double(), k, v, exact, **more))
    for mine, plain, right in zip(got.heads, yard.heads, exact.heads, strict=True):
        for what in ("keys", "values", "lengths"):
            a, b = (getattr(x.parts[-1], what) for x in (mine, right))
            # turned back, keys differ by roundings of a cosine
            off = 4 * torch.finfo(a.dtype).eps if turns and what == "keys" else 0
            assert torch.allclose(a, b, rtol=off, atol=off)
        if votes:
            # shares follow from log-sum-exps of joined splits, which one softmax has not: a few
            # roundings more, and torch errs by less than half of these on some processors (Zen 3)
            want = right.sums.sums.double()
            joins = 4 * torch.finfo(torch.float32).eps * float(want.abs().max())
            close(mine.sums.sums, plain.sums.sums, want, room=joins)


def test_slots_not_in_use_may_hold_anything():
    q, k, v, stores = layer(F16, turns=True, B=1, most=9)
    want = decode_step.run("triton", q, k, v, stores, scale=0.1)
    sums = [h.sums.sums.clone() for h in stores.heads]
    q, k, v, stores = layer(F16, turns=True, B=1, most=9)
    for heads in stores.heads:
        heads.parts[-1].keys[:, :, 5:] = float("nan")
        heads.parts[-1].values[:, :, 5:] = float("nan")
        for part in heads.parts[:-1]:
            beyond = torch.arange(part.keys.codes.shape[2]) >= part.lengths.unsqueeze(-1)
            part.keys.scales[beyond] = float("nan")
            part.values.scales[beyond] = float("inf")
    with poisoned():
        assert torch.equal(decode_step.run("triton", q, k, v, stores, scale=0.1), want)
    assert all(torch.equal(h.sums.sums, x) for h, x in zip(stores.heads, sums, strict=True))


def test_a_token_without_room_is_not_written(monkeypatch):
    q, k, v, stores = layer(F16, votes=False, used=9, most=9)
    pools = [h.parts[-1].keys.clone() for h in stores.heads]
    decode_step.run("triton", q, k, v, stores, scale=0.1)
    for heads, pool in zip(stores.heads, pools, strict=True):
        assert torch.equal(heads.parts[-1].keys, pool)
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    with pytest.raises(IndexError, match="do not fit"):
        decode_step.run("triton", *layer(F16, votes=False, used=9, most=9), scale=0.1)


def test_what_a_layer_keeps_lies_where_it_lay():
    q, k, v, stores = layer(F16, B=1, most=9)
    take = partial(decode_step.run, "triton", scale=0.1)
    take(q, k, v, stores)
    rows, table = stores.kept["table"]
    again = Stores(stores.heads, stores.kept)
    take(q, k, v, again)
    assert again.kept["table"][0] is rows  # nothing moved, nothing was copied
    moved = layer(F16, B=1, most=9)[-1].heads
    other = Stores(moved, stores.kept)
    at = table.data_ptr()
    got = take(q, k, v, other)
    assert other.kept["table"][1].data_ptr() == at
    assert torch.equal(got, take(q, k, v, layer(F16, B=1, most=9)[-1]))
    used = stores.heads[0].parts[-1].lengths.clone()
    take(q, k, v, stores)  # whose table is no longer there
    assert torch.equal(stores.heads[0].parts[-1].lengths, used + 1)


@pytest.mark.parametrize("turns", [False, True])
def test_layers_with_the_same_formats_share_what_is_compiled(turns):
    """In whatever order heads have them, and wherever the table's sections end."""
    stores = layer(F16, turns=turns)[-1]
    turned_round = Stores(stores.heads[::-1])
    assert len(kinds_of(stores)) > 2 and kinds_of(stores) == kinds_of(turned_round)
    assert key_kinds_of(stores) == key_kinds_of(turned_round)
    sections = [np.full((n, 3), n) for n in (1, 2, 3, 5)]
    found = placed({}, sections, torch.device("cpu"))
    assert not any(x.data_ptr() % 16 for x in found)
    assert all(x.tolist() == y.tolist() for x, y in zip(found, sections, strict=True))


def test_what_cannot_be_taken_is_named():
    with pytest.raises(UnsupportedError, match="per KV head must be at most 32, got 33"):
        _, k, v, stores = layer(F32)
        decode_step.run("triton", torch.randn(2, 132, D), k, v, stores, scale=0.1)
    q, k, v, stores = layer(F16)
    first, *others = stores.heads

    def taken(*heads):
        decode_step.run("triton", q, k, v, Stores(heads), scale=0.1)

    with pytest.raises(UnsupportedError, match="of 3 KV heads do not take 4"):
        taken(*others)
    with pytest.raises(UnsupportedError, match="weighted alike"):
        taken(replace(first, sums=replace(first.sums, alpha=1.0)), *others)
    with pytest.raises(UnsupportedError, match="order must be"):
        taken(replace(first, sums=replace(first.sums, order=torch.arange(3))), *others)
    wide = [replace(p, keys=p.keys.float()) for p in first.parts]
    with pytest.raises(UnsupportedError, match="dtype of the queries"):
        taken(replace(first, parts=wide), *others)
    with pytest.raises(UnsupportedError, match="must have slots, and lengths"):
        taken(replace(first, parts=[replace(first.parts[-1], lengths=None)]), *others)
    _, _, _, turned = layer(F16, turns=True)
    with pytest.raises(UnsupportedError, match="turned in all heads of a layer, or none"):
        taken(turned.heads[0], *others)
    for new, said in (
        ({"index": torch.arange(3)}, "index must be"),
        ({"inv_freq": torch.ones(20, dtype=torch.float64)}, "float32, got"),
        ({"inv_freq": torch.ones(33)}, "1 to 32 contiguous angles"),
    ):
        bad = replace(turned.heads[0], turned=replace(turned.heads[0].turned, **new))
        with pytest.raises(UnsupportedError, match=said):
            taken(bad, *turned.heads[1:])
    pool = first.parts[-1]
    one = Format(4, 64, "lloyd", True)
    for what in ("keys", "values"):  # of all stores they are turned at once
        mine = [
            Part(held(pool.keys, f), held(pool.values, g), f, g)
            for b in (replace(one, block=16), one)
            for f, g in [(b, one) if what == "keys" else (one, b)]
        ]
        some, another = (Heads([part, pool]) for part in mine)
        taken(some, some, some, some)
        said = rf"rotated {what} must mix as many channels in all parts, got \[16, 64\]"
        with pytest.raises(UnsupportedError, match=said):
            taken(some, some, another, some)
    every = [Part(held(pool.keys, f), held(pool.values, f), f, f)
             for bits in (1, 2, 3, 4, 8) for f in (Format(bits, 64), Format(bits, 32))]  # fmt: skip
    with pytest.raises(UnsupportedError, match="at most 8 pairs of formats"):
        taken(
            *(Heads([*every[3 * i : 3 * i + 3], *store.parts[-1:]]) for i, store in enumerate(
                [first, first, first, first]
            ))
        )  # fmt: skip
