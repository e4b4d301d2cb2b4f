import pytest
import torch
from kernel_tools import arena, close, few, poisoned

from kvsearch_kernels.decode_attention import Part, decode_attention
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.quantize_kv import (
    Format,
    Packed,
    dequantize_kv,
    fake_quantize,
    quantize_kv,
)
from kvsearch_kernels.repack_kv import NewPool, takes

FORMATS = [  # of which the probes have none; half of them in the quick lane
    Format(8, 32, rotate=True), Format(5, 128), Format(1, 32, rotate=True),
    Format(2, 128, "lloyd"), Format(5, 128, "lloyd"), Format(1, 64, "lloyd", True),
    Format(3, 32, rotate=True, block=8), Format(4, 64, "lloyd", True, block=16),
]  # fmt: skip


def name(fmt):
    turned = f"rotated{fmt.block or ''}" if fmt.rotate else "plain"
    return f"{fmt.bits}-{fmt.group}-{fmt.levels}-{turned}"


def exact(fmt):
    """Whether the codes hang on no sum, whose order torch and Triton choose as they like."""
    return fmt.levels == "uniform" and fmt.bits > 1


@pytest.mark.parametrize("fmt", few(FORMATS, 0, 1, 4, 7), ids=name)
def test_packing_writes_the_bytes_of_the_reference(fmt):
    torch.manual_seed(fmt.bits)
    x = arena(torch.randn(1, 2, 65, 128).half())
    x[0, 0, 3] = 0.0
    x[0, 1, 4] = 1.5
    slots = arena(torch.randint(0, 65, (1, 2, 40)))
    slots[0, 0, :2] = 3
    with poisoned():
        got = quantize_kv.run("triton", x, fmt, slots=slots)
    want = quantize_kv.reference(x, fmt, slots=slots)
    assert got.codes.shape == want.codes.shape
    assert got.scales.shape == want.scales.shape
    wrong = (got.codes != want.codes).any(-1).float().mean()
    assert wrong == 0 or (not exact(fmt) and wrong < 0.05)
    torch.testing.assert_close(got.scales, want.scales, rtol=0 if exact(fmt) else 2e-3, atol=0)

    held = Packed(arena(want.codes), arena(want.scales))
    with poisoned():
        back = dequantize_kv.run("triton", held, fmt)
    picked = x.gather(2, slots.unsqueeze(-1).expand(1, 2, 40, 128))
    fake = fake_quantize(picked, fmt)
    assert torch.equal(back, fake)  # bit for bit
    if wrong == 0 and torch.equal(got.scales, want.scales):
        assert torch.equal(dequantize_kv.run("triton", got, fmt), fake)
    half = dequantize_kv.run("triton", held, fmt, dtype=torch.float16)
    assert torch.equal(half, fake.half())


@pytest.mark.parametrize(("n", "D"), [(63, 256), (65, 256), (300, 64), (0, 64)])
def test_quantize_shapes(n, D):
    fmt = Format(4, D)
    x = torch.randn(1, n, 1, D).transpose(1, 2)
    with poisoned():
        got = quantize_kv.run("triton", x, fmt)
    want = quantize_kv.reference(x, fmt)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(dequantize_kv.run("triton", got, fmt), fake_quantize(x, fmt))


def test_wrong_formats_are_named():
    x = torch.randn(1, 1, 4, 128)
    with pytest.raises(UnsupportedError, match=r"bits must be .*got 6"):
        quantize_kv.run("triton", x, Format(6, 128))
    with pytest.raises(UnsupportedError, match="got 96"):
        quantize_kv.run("triton", x[..., :96], Format(4, 96))
    with pytest.raises(UnsupportedError, match="group"):
        quantize_kv.run("triton", x, Format(4, 256))
    with pytest.raises(UnsupportedError, match="a power of two of channels, got 48"):
        quantize_kv.run("triton", x, Format(4, 64, rotate=True, block=48))
    for fmt in (Format(8, 128, "e4m3"), Format(4, 32, "ggml-1")):
        packed = quantize_kv.reference(x, fmt)
        with pytest.raises(UnsupportedError, match="levels must be"):
            dequantize_kv.run("triton", packed, fmt)
        part = Part(packed, packed, fmt, fmt)
        with pytest.raises(UnsupportedError, match="levels must be"):
            decode_attention.run("triton", x[:, :, 0], [part], scale=1.0)


@pytest.mark.parametrize("bad", [-1, 4, 1 << 40])
def test_bad_slots_are_found_before_the_launch(bad, monkeypatch):
    monkeypatch.setenv("KVSEARCH_CHECK", "1")
    x, slots = torch.randn(1, 1, 4, 64), torch.tensor([0, bad])
    with pytest.raises(IndexError, match=str(bad)):
        quantize_kv.run("triton", x, Format(4, 64), slots=slots)
    with pytest.raises(IndexError, match=str(bad)):
        gather_kv.run("triton", x, slots)


@pytest.mark.parametrize(
    ("n", "D", "R", "dtype"),
    [(1, 64, 64, torch.float16), (65, 256, 64, torch.float16), (300, 64, 64, torch.float32),
     (0, 64, 64, torch.float32)],
)  # fmt: skip
def test_gather_and_turn(n, D, R, dtype):
    torch.manual_seed(n)
    x = arena(torch.randn(2, 3, 70, D).to(dtype))
    slots = arena(torch.randint(0, 70, (2, 1, n)))
    with poisoned():
        kept = gather_kv.run("triton", x, slots)
    assert torch.equal(kept, gather_kv.reference(x, slots))
    by = arena(torch.randint(-500, 500, (n,)))
    inv_freq = 10000.0 ** (-torch.arange(R // 2) / (R // 2))
    with poisoned():
        got = gather_kv.run("triton", x, slots, by=by, inv_freq=inv_freq)
    true = gather_kv.reference(x.double(), slots, by=by, inv_freq=inv_freq)
    eager = gather_kv.reference(x, slots, by=by, inv_freq=inv_freq)
    assert got.dtype is dtype
    if n:
        close(got, eager, true)
    assert torch.equal(got[..., R:], kept[..., R:])


def test_gather_takes_one_list_for_all_heads():
    x, slots = torch.randn(2, 3, 9, 64).half(), torch.tensor([8, 0, 0, 3], dtype=torch.int32)
    assert torch.equal(gather_kv.run("triton", x, slots), x[:, :, slots.long()])


@pytest.mark.parametrize("kind", [torch.uint8, torch.float16])
@pytest.mark.parametrize("width", [1, 2, 8, 48])
def test_gather_moves_codes_and_scales_of_any_width(kind, width):
    x = arena(torch.randint(0, 100, (2, 3, 20, width)).to(kind))
    slots = arena(torch.randint(0, 20, (2, 3, 33)))
    with poisoned():
        got = gather_kv.run("triton", x, slots)
    assert torch.equal(got, gather_kv.reference(x, slots))


def test_more_places_than_32_bits_count_are_refused():
    x = torch.zeros(1, 1, 1, 128).half().expand(1, 1, 1 << 24, 128)
    for held, reason in ((x, "at most 2147483647"), (x[:, :, :-1], None)):
        pool = NewPool(torch.arange(4), [Part(held, held)], 0, (None, None))
        found = takes.why_not([pool], dtype=x.dtype, native=x.dtype)
        assert found == reason or (reason and reason in found)
