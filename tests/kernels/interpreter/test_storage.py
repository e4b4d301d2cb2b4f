import pytest
import torch
from kernel_tools import arena, asked, poisoned

from kvsearch_kernels.decode_step import decode_step
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import (
    Format,
    Packed,
    dequantize_kv,
    fake_quantize,
    quantize_kv,
)
from kvsearch_kernels.repack_kv import NewPool, limits

FORMATS = [  # of which the probes have none
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


@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_packing_writes_the_bytes_of_the_reference(fmt):
    torch.manual_seed(fmt.bits)
    x = arena(torch.randn(1, 2, 65, 128).half())
    x[0, 0, 3] = 0.0
    x[0, 1, 4] = 1.5
    with poisoned():
        got = quantize_kv.run("triton", x, fmt)
    want = quantize_kv.reference(x, fmt)
    assert got.codes.shape == want.codes.shape
    assert got.scales.shape == want.scales.shape
    wrong = (got.codes != want.codes).any(-1).float().mean()
    assert wrong == 0 or (not exact(fmt) and wrong < 0.05)
    torch.testing.assert_close(got.scales, want.scales, rtol=0 if exact(fmt) else 2e-3, atol=0)

    held = Packed(arena(want.codes), arena(want.scales))
    with poisoned():
        back = dequantize_kv.run("triton", held, fmt)
    fake = fake_quantize(x, fmt)
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
            decode_step.run("triton", *asked(x[:, :, 0], [part], x.dtype), scale=1.0)


def test_more_places_than_32_bits_count_are_refused():
    x = torch.zeros(1, 1, 1, 128).half().expand(1, 1, 1 << 24, 128)
    for held, reason in ((x, "at most 2147483647"), (x[:, :, :-1], None)):
        pool = NewPool(torch.arange(4), [Part(held, held)], 0, (None, None))
        found = limits.why_not([pool], dtype=x.dtype, native=x.dtype)
        assert found == reason or (reason and reason in found)
