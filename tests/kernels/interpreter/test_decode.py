import dataclasses

import pytest
import torch
from kernel_tools import arena, close, poisoned
from kvsearch_kernels.decode_attention import Part, decode_attention, probe, triton_impl

from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.quantize_kv import Format, Packed, quantize

F16, F32 = torch.float16, torch.float32


def uniform(bits, D, group=None):
    return Format(bits, group or D)


def lloyd(bits, D, group=None, rotate=True):
    return Format(bits, group or D, "lloyd", rotate)


def held(x, fmt):
    if fmt is None:
        return arena(x)
    packed = quantize(x, fmt)
    return Packed(arena(packed.codes), arena(packed.scales))


def build(G, D, dtype, formats, *, H=2, spread=1.0):
    torch.manual_seed(D + G)
    q = arena(torch.randn(1, G * H, D).to(dtype))
    parts = []
    for key, value, n in formats:
        k, v = (torch.randn(1, H, n, D).to(dtype) for _ in range(2))
        parts.append(Part(held(k, key), held(v * spread, value), key, value))
    return q, parts


def widened(part, kind):
    """The part as tensors of another type."""
    k, v = probe.widened(part, kind)
    return dataclasses.replace(part, keys=k, values=v, key_format=None, value_format=None)


def verify(q, parts, scale, softcap=None):
    with poisoned():
        out, lse = decode_attention.run("triton", q, parts, scale=scale, softcap=softcap)
    wide = [widened(p, torch.float64) for p in parts]
    exact = decode_attention.reference(q.double(), wide, scale=scale, softcap=softcap)
    assert out.dtype is q.dtype
    assert lse.dtype is F32
    close(out, probe.eager(q, parts, scale=scale, softcap=softcap)[0], exact[0])
    # q is rounded once more where it is scaled or rotated before the product
    room = torch.finfo(q.dtype).eps * q.float().norm(dim=-1).max() * scale * 4
    assert torch.equal(lse.isinf(), exact[1].isinf())
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=float(room))


# The op's probe (`test_probes.py`) has every width, kind of level, group and head size, flat and
# next to sinks. Here is what it has not.


@pytest.mark.parametrize("bits", [8, 1])
def test_few_and_many_bits_of_wide_heads(bits):
    fmt = uniform(bits, 256)
    q, parts = build(1, 256, F16, [(fmt, fmt, 150)], H=1)
    verify(q, parts, 256**-0.5)


@pytest.mark.parametrize(
    ("value", "share"),
    [(uniform(bits, 64), share) for bits, share in ((8, 0.8), (4, 0.95), (2, 0.8), (1, 0.95))]
    + [(lloyd(bits, 64), share) for bits, share in ((8, 0.95), (5, 0.8), (3, 0.95))],
)
def test_values_next_to_an_attention_sink(value, share, monkeypatch):
    # one split: the sink's weight is what those of many other slots are relative to
    monkeypatch.setattr(triton_impl, "programs_at_once", lambda *_: 0)
    q, (part,) = build(1, 64, F16, [(None, None, 1500)], H=1)
    k, v = part.keys.clone(), part.values.clone()
    s = (k[0, 0].float() @ q[0, 0].float()) / 8
    wanted = s.logsumexp(0) + torch.tensor(share / (1 - share)).log()
    k[0, 0, 1000] = q[0, 0] * (8 * wanted / q.float().square().sum())
    v[0, 0, 1000] = 0.0  # a constant vector: its step is zero, too
    v[0, 0, 1001] = v[0, 0, 1001] * 2**-10
    fmt = uniform(8, 64)
    verify(q, [Part(held(k, fmt), held(v, value), fmt, value)], 0.125)


def direct(key, value, D):
    """Whether both sides take a path without expanding to values."""
    found = triton_impl.constants(key, value, D, F16)
    return bool(found["KF"] and found["VF"])


def test_lloyd_levels_and_groups_of_32_are_looked_up():
    for keys, values, group, D in (
        (4, 4, 32, 64), (5, 4, 128, 128), (2, 2, 64, 128), (3, 3, 64, 64), (4, 5, 32, 128),
        (2, 2, 32, 64), (3, 3, 128, 128),
    ):  # fmt: skip
        assert direct(*(lloyd(bits, D, min(group, D)) for bits in (keys, values)), D)
    for keys, values, D in ((4, 4, 128), (3, 3, 64), (2, 2, 128), (4, 2, 64), (1, 1, 128)):
        assert direct(uniform(keys, D, 32), uniform(values, D, 32), D)
    eight = uniform(8, 64, 32), uniform(8, 128, 32)
    assert direct(*eight[:1] * 2, 64) and not direct(*eight[1:] * 2, 128)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (uniform(1, 128, 32), uniform(1, 128, 32)),
        (uniform(8, 128, 32), uniform(8, 128, 32)),
        (uniform(5, 128), uniform(5, 128, 64)),
        (lloyd(8, 128, 64), lloyd(1, 128, 64, rotate=False)),
        (uniform(8, 128), None),
    ],
)
def test_every_other_format(key, value):
    q, parts = build(4, 128, F16, [(key, value, 65)], H=1)
    verify(q, parts, 128**-0.5)


@pytest.mark.parametrize(("fmt", "G"), [(None, 12), (uniform(4, 64), 20), (lloyd(4, 64), 40)])
def test_more_than_eight_query_heads(fmt, G):
    """They have tiles of their own."""
    q, parts = build(G, 64, F16, [(fmt, fmt, 150)], H=1)
    verify(q, parts, 0.125)


@pytest.mark.parametrize("n", [63, 65])
def test_lengths(n):
    q, parts = build(1, 64, F16, [(None, None, n), (uniform(4, 64), uniform(4, 64), n)])
    verify(q, parts, 0.125)


def test_large_values_and_softcap():
    D = 64
    q, parts = build(3, D, F16, [(uniform(4, D), uniform(1, D), 200)], spread=200.0)
    verify(q, parts, D**-0.5)
    verify(q, parts, 1.0, softcap=10.0)


def test_slots_not_in_use_may_hold_anything():
    fmt = uniform(4, 64)
    q, parts = build(2, 64, F16, [(None, None, 100), (fmt, fmt, 100)])
    used = torch.tensor([[10, 0]], dtype=torch.int32)
    parts = [dataclasses.replace(p, lengths=used) for p in parts]
    want = decode_attention.run("triton", q, parts, scale=0.1)
    parts[0].keys[:, :, 10:] = float("nan")
    parts[0].values[:, :, 10:] = float("nan")
    parts[1].keys.scales[:, :, 10:] = float("nan")
    parts[1].values.scales[:, :, 10:] = float("inf")
    parts[1].values.scales[:, 1] = float("nan")
    got = decode_attention.run("triton", q, parts, scale=0.1)
    assert torch.equal(got[0][:, :2], want[0][:, :2])
    assert (got[0][:, 2:] == 0).sum() == (want[0][:, 2:] == 0).sum()
    assert not decode_attention.reference(q, parts, scale=0.1)[0].isnan().any()


def test_nothing_held():
    q, parts = build(2, 64, F16, [(None, None, 0)])
    out, lse = decode_attention.run("triton", q, parts, scale=0.1)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_fronts_of_longer_pools_are_read_in_place(monkeypatch):
    fmt = uniform(2, 64)
    q, (part,) = build(1, 64, F16, [(fmt, fmt, 200)])
    front = [Packed(x.codes[:, :, :70], x.scales[:, :, :70]) for x in (part.keys, part.values)]
    cut = Part(front[0], front[1], fmt, fmt)
    monkeypatch.setattr(torch.Tensor, "contiguous", refuse_to_copy(torch.Tensor.contiguous))
    verify(q, [cut], 0.125)


def refuse_to_copy(real):
    def contiguous(x):
        assert x.numel() < 70 * 16 or x.is_contiguous(), "a pool was copied"
        return real(x)

    return contiguous


def test_what_cannot_be_taken_is_named():
    q, parts = build(1, 64, F16, [(None, None, 5)])
    with pytest.raises(UnsupportedError, match="got 5"):
        decode_attention.run("triton", q, parts * 5, scale=1.0)
    with pytest.raises(UnsupportedError, match=r"float16.*float32"):
        wide = dataclasses.replace(parts[0], keys=parts[0].keys.float())
        decode_attention.run("triton", q, [wide], scale=1.0)
    with pytest.raises(UnsupportedError, match="96"):
        decode_attention.run("triton", torch.randn(1, 2, 96).half(), parts, scale=1.0)
    some, other = (Format(4, 64, rotate=True, block=b) for b in (16, None))
    _, parts = build(1, 64, F16, [(some, None, 5), (other, None, 5)])
    with pytest.raises(UnsupportedError, match=r"keys must mix .* all parts, got \[16, 64\]"):
        decode_attention.run("triton", q, parts, scale=1.0)


def test_lengths_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    q, parts = build(1, 64, F16, [(None, None, 5)])
    bad = dataclasses.replace(parts[0], lengths=torch.tensor([[5, 6]], dtype=torch.int32))
    with pytest.raises(IndexError, match="6"):
        decode_attention.run("triton", q, [bad], scale=1.0)
