"""The loops for a CPU: bit for bit the references where numbers are stored, close where summed."""

import itertools
import shutil
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernel_tools import asked
from test_references import OPS, WIDTHS, call
from test_trust import PROVEN

from kvsearch_kernels import numba_loops
from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.codebooks import CODEBOOKS, Codebook
from kvsearch_kernels.decode_step import Entering, Heads, Stores, Sums, decode_step
from kvsearch_kernels.decode_step import probe as step_probe
from kvsearch_kernels.evict_in_place import evict_in_place
from kvsearch_kernels.numba_args import LEVELS
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, dequantize_kv, quantize_kv, triton_impl
from kvsearch_kernels.quantize_kv.reference import quantize
from kvsearch_kernels.trust import holds, prove

LOOPS = [(bits, levels) for bits, levels in WIDTHS if levels in LEVELS]
# that take any of the arguments of their probes, but for turning keys
NUMBA = [op for op in OPS if "numba" in op.impls and op is not evict_in_place]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("op", NUMBA, ids=lambda op: op.name)
def test_auto_takes_the_loops_on_a_cpu_and_nowhere_else(op):
    args, kwargs = call(op)
    assert op.pick(*args, **kwargs) == "numba"
    args, kwargs = call(op, "meta")
    with pytest.raises(UnsupportedError, match="runs on cpu, got meta"):
        op.run("numba", *args, **kwargs)


@pytest.mark.parametrize(("op", "dtype"), PROVEN, ids=lambda x: getattr(x, "name", str(x)))
def test_the_loops_pass_every_probe_that_they_take(op, dtype):
    if op not in NUMBA:
        pytest.skip("has no loops, or for a part of its arguments")
    assert prove(op, "numba", torch.device("cpu"), dtype) is None


def test_evictions_at_every_token_pass_the_probe():
    """Cases of other intervals run on the reference."""
    took = Counter()

    def run(*args):
        ran = {}
        out = evict_in_place.record(ran, *args)
        took.update(ran.values())
        return out

    assert holds(evict_in_place, run, torch.device("cpu"), F32) is None
    assert took == {"numba": 3, "reference": 3}


def formats(bits, levels, D):
    groups = {CODEBOOKS[levels].group} if CODEBOOKS[levels].group else {D, 32}
    for rotate, group in itertools.product((False, True), groups):
        yield Format(bits, group, levels, rotate)
    yield Format(bits, 32, levels, True, block=16)


@pytest.mark.parametrize("D", [64, 96])
@pytest.mark.parametrize(("bits", "levels"), LOOPS)
def test_storing_and_reading_is_that_of_the_references_bit_for_bit(bits, levels, D):
    torch.manual_seed(bits)
    every = torch.randn(2, 40, 3, D) * torch.rand(2, 40, 3, 1) * 5
    every[0, 0], every[1, 2] = 0.0, 1.5
    for fmt, dtype in itertools.product(formats(bits, levels, D), (F16, BF16, F32, F64)):
        x = every.to(dtype).transpose(1, 2)
        for n in (0, 5, 40):
            want = quantize_kv.reference(x[:, :, :n], fmt)
            got = quantize_kv.run("numba", x[:, :, :n], fmt)
            assert torch.equal(got.codes, want.codes)
            assert torch.equal(got.scales, want.scales)
            assert got.scales.shape == want.scales.shape
        read = dequantize_kv.run("numba", got, fmt, dtype=dtype)
        assert torch.equal(read, dequantize_kv.reference(got, fmt, dtype=dtype))
        assert read.dtype is dtype


class Halves(Codebook):
    """Multiples of 1/2 from -4 on, without a scale: levels that no loop and no kernel knows."""

    numbers, words, bits = 0, "halves", (4,)

    def encode(self, groups, bits):
        none = groups.new_empty((*groups.shape[:-1], 0), dtype=torch.float16)
        return (2 * groups + 8).round().clamp(0, 15), none

    def decode(self, codes, scales, bits):
        return codes / 2 - 4


def test_a_codebook_needs_no_loop_and_no_kernel(monkeypatch):
    """One file and one line, as docs/adding.md says: whatever lacks it says so."""
    monkeypatch.setitem(CODEBOOKS, "halves", Halves())
    fmt, x = Format(4, 64, "halves"), torch.randn(1, 2, 9, 64)
    packed, query, args = quantize_kv(x, fmt), torch.randn(1, 4, 64), {"scale": 0.2}
    read = dequantize_kv(packed, fmt, dtype=F32)
    assert torch.equal(read, (2 * x).round().clamp(-8, 7) / 2)
    parts = [Part(packed, packed, fmt, fmt)]
    got, want = (
        decode_step(*asked(query, some, F16), **args) for some in (parts, [Part(read, read)])
    )
    assert torch.allclose(got, want, atol=1e-6)
    with pytest.raises(UnsupportedError, match="no loop for levels 'halves'"):
        dequantize_kv.run("numba", packed, fmt)
    with pytest.raises(UnsupportedError, match="no loop for levels 'halves'"):
        decode_step.run("numba", *asked(query, parts, F16), **args)
    assert "halves" in triton_impl.why_not_format(fmt, 64)


def test_not_a_number_stays_one():
    x = torch.randn(1, 1, 3, 64)
    x[0, 0, 0, 5], x[0, 0, 1, 9] = float("nan"), float("inf")
    for bits, rotate in itertools.product((8, 4, 2), (False, True)):
        fmt = Format(bits, 64, rotate=rotate)
        want, got = quantize_kv.reference(x, fmt), quantize_kv.run("numba", x, fmt)
        assert torch.equal(got.codes, want.codes)
        a, b = (dequantize_kv.run(i, want, fmt) for i in ("reference", "numba"))
        assert torch.equal(a.isnan(), b.isnan())
        assert b[0, 0, 0].isnan().all()


def part(n, keys, values, dtype, D=64, Dv=64, along="channels"):
    keys, held = keys if keys is None else replace(keys, along=along), []
    for fmt, width in ((keys, D), (values, Dv)):
        x = torch.randn(2, 2, n, width)
        packed = x.to(dtype) if fmt is None else quantize(x, fmt)
        held.append(packed if fmt is None else replace(packed, codes=packed.codes.contiguous()))
    return Part(held[0], held[1], keys, values)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("bits", "levels"), LOOPS)
def test_decoding_is_that_of_the_reference(bits, levels, softcap):
    torch.manual_seed(bits)
    for fmt in formats(bits, levels, 64):
        native = (F16, BF16, F32, F64)[bits % 4]
        parts = [
            part(70, fmt, None, native), part(33, fmt, fmt, native), part(9, None, None, F16),
            part(1, None, fmt, native),
        ]  # fmt: skip
        if CODEBOOKS[levels].group is None and not fmt.block:
            parts.append(part(50, fmt, fmt, native, along="tokens"))  # its first group is short
        used = torch.tensor([[5, 0], [1, 9]], dtype=torch.int32)
        for some in (parts, [replace(parts[0], lengths=used), replace(parts[2], lengths=used)]):
            agree(torch.randn(2, 6, 64), some, softcap, native)


def test_decoding_values_of_another_width_and_nothing():
    fmt = Format(4, 32, rotate=True)
    parts = [part(40, fmt, fmt, F16, Dv=32), part(3, None, None, BF16, Dv=32)]
    agree(torch.randn(2, 2, 64), parts, None)
    none = torch.zeros(2, 2, dtype=torch.int32)
    agree(torch.randn(2, 2, 64), [replace(p, lengths=none) for p in parts], None)


def agree(q, parts, softcap, native=F16):
    """In fp64 (where vectors are turned back as the reference does) and in fp32."""
    for dtype, room in ((F64, 1e-12), (F32, 2e-6)):
        args = {"scale": 0.2, "softcap": softcap}
        want = decode_step.reference(*asked(q.double(), parts, native), **args)
        got = decode_step.run("numba", *asked(q.to(dtype), parts, native), **args)
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), want, rtol=0, atol=room * 4)


def test_a_slot_that_receives_almost_nothing_is_still_right():
    q, (one,) = torch.zeros(1, 1, 64), [part(200, None, None, F32)]
    q[0, 0, 0] = 1.0
    keys, values = one.keys[:1, :1].clone(), one.values[:1, :1].clone()
    keys[..., 0] = -torch.linspace(0, 86, 200)
    found = []
    for how, query in (("numba", q), ("reference", q.double())):
        used = torch.full((1, 1), 199, dtype=torch.int32)
        pool = Part(keys.clone(), values.clone(), lengths=used)
        sums = Sums(torch.zeros(1, 1, 200, dtype=query.dtype), None, 0, 200, 0.0, None, 1.0)
        new = (x[:, :, -1:] for x in (keys, values))
        decode_step.run(how, query, *new, Stores([Heads([pool], sums)]), scale=1.0)
        found.append(sums.sums.double())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0)


def test_what_cannot_be_taken_is_named():
    (k, fmt), _ = call(quantize_kv)
    with pytest.raises(UnsupportedError, match="groups along tokens"):
        quantize_kv.run("numba", k, replace(fmt, along="tokens"))
    with pytest.raises(UnsupportedError, match="last axis"):
        quantize_kv.run("numba", k.transpose(2, 3), fmt)
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        quantize_kv.run("numba", k.float().requires_grad_(), fmt)
    with torch.no_grad():
        quantize_kv.run("numba", k.float().requires_grad_(), fmt)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as fake, pytest.raises(UnsupportedError, match="memory of its own"):
        quantize_kv.run("numba", fake.from_tensor(k), fmt)
    packed = quantize_kv(k, fmt)
    with pytest.raises(UnsupportedError, match="no loop for levels 'own'"):
        dequantize_kv.run("numba", packed, replace(fmt, levels="own"))


def test_a_second_process_compiles_nothing():
    args, kwargs = call(decode_step)
    decode_step.run("numba", args[0].float(), *args[1:], **kwargs)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_references import call, decode_step as op\n"
        "args, kwargs = call(op)\n"
        "op.run('numba', args[0].float(), *args[1:], **kwargs)\n"
        "from kvsearch_kernels.numba_loops.step import step\n"
        "print(sum(step.stats.cache_hits.values()), sum(step.stats.cache_misses.values()))\n"
    )
    here = __file__.rsplit("test_numba", 1)[0]
    run = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True)
    assert run.stdout.split() == ["1", "0"], run.stderr


def test_a_change_of_any_loops_file_compiles_anew(tmp_path, monkeypatch):
    place = tmp_path / "kvsearch_kernels" / "numba_loops"
    shutil.copytree(
        Path(numba_loops.__file__).parent, place, ignore=shutil.ignore_patterns("__pycache__")
    )
    (place.parent / "__init__.py").touch()
    code = (
        "import numpy as np\n"
        "from kvsearch_kernels.numba_loops.places import slots_of as loop\n"
        "loop(np.zeros((1, 50), np.int64))\n"
        "print(*loop.stats.cache_hits.values())\n"
    )
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))

    def hits():
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
        )
        return run.stdout.split(), run.stderr

    assert hits() == ([], "")
    assert hits() == (["1"], "")
    with (place / "memory.py").open("a") as file:
        file.write("# another\n")
    assert hits() == ([], "")


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_step_is_computed_in_fp32_whatever_the_type(dtype):
    # the probe allows what attention in 16 bits is off by; the loops are held to the reference
    for args, kwargs in step_probe.cases(torch.device("cpu"), dtype):
        q, k, v, stores = args
        yard, exact = (deepcopy(stores) for _ in range(2))
        got = decode_step.run("numba", *args, **kwargs)
        want = decode_step.reference(q, k, v, yard, **kwargs)
        right = decode_step.reference(q.double(), k, v, exact, **kwargs)
        assert over_budget("output", got, want, right, slack=HARDWARE) is None
        for mine, its, best in zip(stores.heads, yard.heads, exact.heads, strict=True):
            if mine.sums is not None:
                sums = (mine.sums.sums, its.sums.sums, best.sums.sums.double())
                assert over_budget("sums", *sums, slack=HARDWARE) is None


def test_keys_that_cannot_be_turned_are_named():
    device = torch.device("cpu")
    (q, k, v, stores), more = next(
        (args, kwargs) for args, kwargs in step_probe.cases(device, torch.float32)
        if args[3].heads[0].turned is not None
    )  # fmt: skip
    first, *others = stores.heads
    mixed = [replace(first, turned=None), *others]
    with pytest.raises(UnsupportedError, match="turned in all heads of a layer, or none"):
        decode_step.run("numba", q, k, v, type(stores)(mixed), **more)
    own = replace(first.turned, inv_freq=first.turned.inv_freq.expand(1, -1))
    with pytest.raises(UnsupportedError, match="no loop for angles of each head"):
        decode_step.run(
            "numba", q, k, v, type(stores)([replace(first, turned=own), *others]), **more
        )
    assert decode_step.pick(q, k, v, stores, **more) == "numba"


@pytest.mark.parametrize("recent", [0, 3])
def test_tokens_enter_a_tier_as_in_the_reference(recent):
    B, H, D, n, room = 2, 2, 64, 9, 14  # 14 slots, of which 13 stay
    draw = torch.Generator().manual_seed(recent)
    formats = Format(5, 32, rotate=True), Format(3, 64)
    sides = [quantize(torch.randn(B, H, room, D, generator=draw), fmt) for fmt in formats]
    pools = [torch.zeros(B, H, 2, D, dtype=F16) for _ in range(2)]
    sums = torch.rand(B, H, room + 1, generator=draw) * (torch.arange(room + 1) < n)
    enters = Entering(
        torch.tensor([n]), room - 1, 1, recent, born=torch.arange(room + 1).int().repeat(B, H, 1),
        divisors=torch.arange(100.0),
    )  # fmt: skip
    lengths = torch.zeros(B, H, dtype=torch.int32)
    parts = [Part(*sides, *formats), Part(*pools, lengths=lengths)]
    mine = Stores([Heads(parts, Sums(sums, None, 0, 1, 1.0, None, 0.9), entering=enters)])
    its = deepcopy(mine)
    for token in range(12):
        q, k, v = (torch.randn(B, h, D, generator=draw) for h in (2 * H, H, H))
        asked = q, k.half().unsqueeze(2), v.half().unsqueeze(2)
        got = decode_step.run("numba", *asked, mine, scale=0.3)
        torch.testing.assert_close(got, decode_step.reference(*asked, its, scale=0.3))
        (a,), (b,) = mine.heads, its.heads
        held = int(enters.count)
        assert held == min(room - 1, n + 1 + token) == int(b.entering.count)
        for x, y in zip(sides, (b.parts[0].keys, b.parts[0].values), strict=True):
            assert torch.equal(x.codes[:, :, :held], y.codes[:, :, :held])
            assert torch.equal(x.scales[:, :, :held], y.scales[:, :, :held])
        assert torch.equal(a.entering.born[..., : held + 1], b.entering.born[..., : held + 1])
        torch.testing.assert_close(sums[..., : held + 1], b.sums.sums[..., : held + 1])
        assert not lengths.any() and not b.parts[1].lengths.any()
    born = enters.born[..., : room - 1]
    assert (born[..., 0] == 0).all() and len({tuple(x) for x in born.flatten(0, 1).tolist()}) > 1


def test_tiers_that_tokens_cannot_enter_are_named():
    (q, k, v, stores), more = call(decode_step)
    (first,) = stores.heads
    how = Entering(torch.tensor([1]), None, 0, 0)
    fmt = Format(4, 64, levels="lloyd")
    tier = quantize(torch.randn(*first.parts[-1].keys.shape), fmt)
    for parts, reason in (
        ([*first.parts, *first.parts], "tokens enter the only tier beside the pool"),
        ([Part(tier, tier, fmt, fmt), first.parts[-1]], "no loop by which tokens enter a tier of"),
    ):
        heads = replace(first, parts=parts, sums=None, entering=how)
        with pytest.raises(UnsupportedError, match=reason):
            decode_step.run("numba", q, k, v, Stores([heads]), **more)
