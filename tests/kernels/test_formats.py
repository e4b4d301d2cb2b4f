"""Formats of other engines, against their definitions written again number by number."""

import itertools

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.quantize_kv import Format, dequantize, fake_quantize, quantize
from kvsearch_kernels.quantize_kv.reference import hadamard

F = np.float32
FP8 = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}  # bits of exponent and mantissa, bias
BLOCKS = [("ggml-0", 8), ("ggml-0", 5), ("ggml-0", 4), ("ggml-1", 5), ("ggml-1", 4)]
BYTES = {  # of 32 numbers in ggml
    ("ggml-0", 8): 34, ("ggml-0", 5): 22, ("ggml-0", 4): 18, ("ggml-1", 5): 24, ("ggml-1", 4): 20,
}  # fmt: skip


def fp8_numbers(name):
    """Finite numbers of the format from 0 up; a number's code is its index."""
    exponent, mantissa, bias = FP8[name]
    codes = np.arange(2 ** (exponent + mantissa))
    e, m = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    found = np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))
    # E4M3 spends one code on what is not a number, E5M2 the whole last exponent
    return found[:-1] if name == "e4m3" else found[e < 2**exponent - 1]


@pytest.mark.parametrize("name", FP8)
def test_fp8_is_the_nearest_number_and_ties_go_to_even_codes(name):
    numbers = fp8_numbers(name)
    assert numbers[-1] == {"e4m3": 448, "e5m2": 57344}[name]
    every = torch.arange(1 << 16).to(torch.uint16)
    halves = torch.cat([every.view(kind).float() for kind in (torch.float16, torch.bfloat16)])
    middles = torch.from_numpy((numbers[1:] + numbers[:-1]) / 2).float()
    near = [torch.nextafter(middles, middles + s) for s in (-1, 1)]
    x = torch.cat([halves[~halves.isnan()], middles, -middles, *near])
    size = x.abs().double().numpy()
    above = np.searchsorted(numbers, size).clip(1, len(numbers) - 1)
    below = above - 1
    down, up = size - numbers[below], numbers[above] - size
    nearest = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    want = nearest + 128 * torch.signbit(x).numpy()
    fmt = Format(8, 64, name)
    packed = quantize(x.unsqueeze(-1).expand(-1, 64), fmt)
    assert np.array_equal(packed.codes[:, 7].numpy(), want)
    assert packed.scales.nbytes == 0 and packed.nbytes == 64 * len(x)
    back = fake_quantize(x.unsqueeze(-1).expand(-1, 64), fmt)[:, 7]
    assert np.array_equal(back.numpy(), np.copysign(numbers[nearest], x.numpy()).astype(F))
    inside = x.abs() <= numbers[-1]
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    assert torch.equal(back[inside], x[inside].to(dtype).float())
    assert fake_quantize(torch.full((1, 64), torch.nan), fmt).isnan().all()


def inverse(step):
    with np.errstate(divide="ignore", over="ignore"):
        found = F(1) / step if step else F(0)
    return found if np.isfinite(found) else F(0)  # in C, what follows is undefined


def half_away(x):
    """C's `roundf`; exact, as Python computes it in 64 bits."""
    return int(float(x) + 0.5) if x >= 0 else -int(0.5 - float(x))


def block(x, levels, bits):
    """Codes, stored numbers in fp16, and values of one block."""
    with np.errstate(under="ignore", over="ignore"):
        if levels == "ggml-1":
            low, top = min(x), 2**bits - 1
            step = F(max(x) - low) / F(top)
            codes = [min(top, int(F(F(v - low) * inverse(step)) + F(0.5))) for v in x]
            stored = [np.float16(step), np.float16(low)]
            return codes, stored, [F(c) * F(stored[0]) + F(stored[1]) for c in codes]
        half = 2 ** (bits - 1)
        if bits == 8:
            step = max(abs(v) for v in x) / F(127)
            codes = [half_away(v * inverse(step)) + half for v in x]
        else:
            far = x[0]
            for v in x:
                far = v if abs(v) > abs(far) else far
            step = far / F(-half)
            codes = [min(2 * half - 1, int(F(v * inverse(step)) + F(half + 0.5))) for v in x]
        stored = [np.float16(step)]
        return codes, stored, [F(c - half) * F(stored[0]) for c in codes]


def blocks():
    """Blocks `[n, 32]` fp32 on which a wrong reading of the definitions shows."""
    draw = np.random.default_rng(0)
    found = draw.standard_normal((300, 32)) * 10.0 ** draw.uniform(-6, 3.5, (300, 1))
    ties, ramp = np.zeros((8, 32)), np.arange(32)
    ties[0, 3], ties[0, 9] = 2.5, -2.5  # the first of two as far from zero
    ties[1, 3], ties[1, 9] = -2.5, 2.5
    ties[2], ties[3] = ramp / 2 - 8, 8 - ramp / 2  # halves between codes
    ties[4, :5] = 127, 0.5, -1.5, np.nextafter(F(0.5), F(0)), -np.nextafter(F(1.5), F(0))
    ties[5, 0], ties[5, 1:] = -127, ramp[1:] * 2 + 0.5
    ties[6], ties[7] = 1.25, -3.0  # one number only
    sizes = [0, 1e-45, 3e-39, 2e-38, 1e-9, 6e-8, 4e-6, 65504, 100000]
    edges = np.stack([s * (ramp - 16) / 16 for s in sizes])
    return np.concatenate([found, ties, edges]).astype(F)


@pytest.mark.parametrize(("levels", "bits"), BLOCKS)
def test_blocks_are_those_of_ggml(levels, bits):
    x = blocks()
    codes, stored, values = zip(*(block(row, levels, bits) for row in x), strict=True)
    got, scales = CODEBOOKS[levels].encode(torch.from_numpy(x), bits)
    assert np.array_equal(got.numpy(), codes)
    assert np.array_equal(scales.numpy().view(np.int16), np.array(stored).view(np.int16))
    fmt, pairs = (
        Format(bits, 32, levels),
        torch.from_numpy(x[:316]).unflatten(0, (-1, 2)).flatten(1),
    )
    want = torch.from_numpy(np.array(values[:316], F)).unflatten(0, (-1, 2)).flatten(1)
    assert torch.equal(fake_quantize(pairs, fmt), want)
    assert quantize(pairs, fmt).nbytes == 316 * BYTES[levels, bits]


@pytest.mark.parametrize(("levels", "bits"), BLOCKS)
def test_blocks_are_those_that_the_gguf_package_writes(levels, bits):
    """llama.cpp's own Python, on what it defines: blocks that fp16 holds."""
    kind = gguf.GGMLQuantizationType[f"Q{bits}_{levels[-1]}"]
    x = np.concatenate([row for row in blocks() if 1e-4 < abs(row).max() < 60000])[None]
    written = quants.quantize(x, kind)
    fmt = Format(bits, 32, levels)
    assert quantize(torch.from_numpy(x), fmt).nbytes == written.nbytes
    got = fake_quantize(torch.from_numpy(x), fmt)
    assert np.array_equal(got.numpy(), quants.dequantize(written, kind))


@pytest.mark.parametrize("D", [64, 96, 128, 192])
def test_values_can_be_rotated_in_smaller_blocks(D):
    x = torch.randn(5, D)
    small = [hadamard(part) for part in x.split(32, -1)]
    assert torch.equal(hadamard(x, 32), torch.cat(small, -1))
    signs = [[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)]
    matrix = torch.tensor(signs) / 32**0.5
    torch.testing.assert_close(small[1], x[:, 32:64] @ matrix)
    for levels, bits in itertools.product(("uniform", "lloyd", "ggml-0"), (8, 4)):
        fmt = Format(bits, 32, levels, rotate=True, block=32)
        plain = Format(bits, 32, levels)
        want = hadamard(fake_quantize(hadamard(x, 32), plain), 32)
        assert torch.equal(fake_quantize(x, fmt), want)


@pytest.mark.parametrize(("bits", "tokens"), [(2, 96), (4, 96), (2, 70)])
def test_groups_along_tokens_are_kivis(bits, tokens):
    """Each channel has a minimum and a step per 32 neighbouring tokens, counted from the newest."""
    x = np.random.default_rng(0).standard_normal((tokens, 16)).astype(F)
    x[:, 5] = 3  # one number only
    want, top = np.empty_like(x), F(2**bits - 1)
    for end in range(tokens, 0, -32):
        for channel in range(16):
            group = x[max(0, end - 32) : end, channel]
            step = F(np.float16((group.max() - group.min()) / top))
            low = F(np.float16(group.min()))
            codes = np.rint((group - low) / max(step, F(1e-8))).clip(0, top)
            want[max(0, end - 32) : end, channel] = codes * step + low
    fmt = Format(bits, 32, along="tokens")
    packed = quantize(torch.from_numpy(x), fmt)
    assert np.array_equal(dequantize(packed, fmt).numpy(), want)
    assert packed.nbytes == tokens * 16 * bits // 8 + -(-tokens // 32) * 16 * 4
