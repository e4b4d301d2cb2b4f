import dataclasses

import pytest
import torch
from kernel_tools import arena, asked, close, poisoned

from kvsearch_kernels.decode_step import decode_step, table
from kvsearch_kernels.decode_step.probe import plainly
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.packed_attention import Part, triton_args
from kvsearch_kernels.quantize_kv import Format, Packed, quantize

F16 = torch.float16


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


def verify(q, parts, scale, softcap=None):
    more = {"scale": scale, "softcap": softcap}
    with poisoned():
        out = decode_step.run("triton", *asked(q, parts, q.dtype), **more)
    assert out.dtype is q.dtype
    q, k, v, stores = asked(q, parts, q.dtype)
    exact = decode_step.reference(*asked(q.double(), parts, q.dtype), **more)
    close(out, plainly(q, k, v, stores, **more), exact)


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
    monkeypatch.setattr(table, "programs_at_once", lambda *_: 0)
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
    found = triton_args.constants(key, value, D, F16)
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
    want = decode_step.run("triton", *asked(q, parts, F16), scale=0.1)
    parts[0].keys[:, :, 10:] = float("nan")
    parts[0].values[:, :, 10:] = float("nan")
    parts[1].keys.scales[:, :, 10:] = float("nan")
    parts[1].values.scales[:, :, 10:] = float("inf")
    parts[1].values.scales[:, 1] = float("nan")
    assert torch.equal(decode_step.run("triton", *asked(q, parts, F16), scale=0.1), want)
    assert not decode_step.reference(*asked(q, parts, F16), scale=0.1).isnan().any()


def test_what_cannot_be_taken_is_named():
    q, parts = build(1, 64, F16, [(None, None, 5)])

    def taken(q, parts):
        decode_step.run("triton", *asked(q, parts, F16), scale=1.0)

    taken(q, parts * 3)
    with pytest.raises(UnsupportedError, match="1 to 4 parts, got 5"):
        taken(q, parts * 4)
    with pytest.raises(UnsupportedError, match=r"float16.*float32"):
        taken(q, [dataclasses.replace(parts[0], keys=parts[0].keys.float())])
    with pytest.raises(UnsupportedError, match="96"):
        taken(torch.randn(1, 2, 96).half(), parts)
    for bad in ({"scale": 0.0}, {"scale": 1.0, "softcap": 0.0}):
        with pytest.raises(UnsupportedError, match=r"(scale|softcap) must be above 0, got 0.0"):
            decode_step.run("triton", *asked(q, parts, F16), **bad)


def test_lengths_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    q, parts = build(1, 64, F16, [(None, None, 5)])
    bad = dataclasses.replace(parts[0], lengths=torch.tensor([[5, 6]], dtype=torch.int32))
    with pytest.raises(IndexError, match="6"):
        decode_step.run("triton", *asked(q, [bad], F16), scale=1.0)
