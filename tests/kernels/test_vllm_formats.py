"""Formats of vLLM, against its definitions written again number by number in NumPy."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch

from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.codebooks.turboquant import levels
from kvsearch_kernels.codebooks.vllm import _signs_on
from kvsearch_kernels.quantize_kv import Format, dequantize, fake_quantize, quantize
from kvsearch_kernels.quantize_kv.reference import hadamard

F, D = np.float32, 64
# 1 where torch's generator, seeded as in vLLM, draws +1; the first channel is the highest bit
SIGNS = {64: 0xB09ACEA68DAC0101, 128: 0xB09ACEA68DAC010136BC22651C2AFED6}
E4M3 = [  # numbers from 0 up; a number's code is its index
    math.ldexp(m / 8 + (e > 0), max(e, 1) - 7) for e in range(16) for m in range(8)
][:-1]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def heads() -> np.ndarray:
    """Vectors `[n, 64]` fp32 on which a wrong reading of the definitions shows."""
    draw = np.random.default_rng(0)
    found = draw.standard_normal((200, D)) * 10.0 ** draw.uniform(-4, 2.5, (200, 1))
    ramp = np.arange(D)
    edges = np.zeros((8, D))
    edges[1, 5], edges[2] = 3.0, 1.5  # one number alone; one number only
    edges[3], edges[4] = ramp / 2 - 16, 127 - 2 * ramp  # halves between codes, both signs
    edges[5], edges[6] = 1e-7 * (ramp - 30), 6e-4 * (ramp - 20)  # below the least scale
    edges[7] = np.where(ramp % 3, -250.0, 440.0)
    return np.concatenate([found, edges]).astype(F)


def nearest(x: float, numbers: list[float]) -> int:
    """Index of the number nearest to `x` >= 0; of two as near the even index."""
    return min(range(len(numbers)), key=lambda i: (abs(numbers[i] - x), i % 2))


def half_away(x: np.floating) -> int:
    """As a cast to an integer after a half is added in fp32."""
    return int(F(x + F(0.5))) if x >= 0 else int(F(x - F(0.5)))


def int8(x):
    scale = max(F(np.abs(x).max() / F(127)), F(1e-6))
    inverse = F(F(1) / scale)
    return [F(F(min(max(half_away(F(v * inverse)), -128), 127)) * scale) for v in x]


def fp8(x):
    scale = max(F(np.abs(x).max() / F(448)), F(1e-6))
    inverse = F(F(1) / scale)
    sizes = (E4M3[nearest(min(abs(float(F(v * inverse))), 448.0), E4M3)] for v in x)
    return [F(F(math.copysign(s, v)) * scale) for s, v in zip(sizes, x, strict=True)]


def transform(x):
    """The Hadamard transform without its factor, step by step in fp32."""
    x, step = list(x), 1
    while step < len(x):
        for i in range(len(x)):
            if not i & step:
                x[i], x[i + step] = F(x[i] + x[i + step]), F(x[i] - x[i + step])
        step *= 2
    return x


def int4(x):
    signs = [F(1) if SIGNS[D] >> (D - 1 - i) & 1 else F(-1) for i in range(D)]
    y = transform([F(v * s) for v, s in zip(x, signs, strict=True)])
    scale = max(F(F(max(y) - min(y)) / F(15)), F(1e-6))
    zero = min(max(half_away(F(-min(y) / scale)), 0), 15)
    inverse = F(F(1) / scale)
    codes = [min(max(half_away(F(F(v * inverse) + F(zero))), 0), 15) for v in y]
    bits = int(np.array(scale).view(np.uint32))
    stored = np.array((bits & 0xFFFFFFF0) | zero, np.uint32)  # the zero point in the lowest bits
    step = np.array(int(stored) & 0xFFFFFFF0, np.uint32).view(F)
    back = transform([F(F(c - zero) * step) for c in codes])
    return [F(F(v * s) / F(D)) for v, s in zip(back, signs, strict=True)]


def nvfp4(x):
    out = []
    for block in x.reshape(-1, 16):
        most = F(np.abs(block).max() * F(F(1) / F(6)))
        scale = E4M3[nearest(min(float(most), 448.0), E4M3)]
        inverse = F(F(1) / F(scale)) if scale else F(0)
        sizes = (E2M1[nearest(min(abs(float(F(v * inverse))), 6.0), E2M1)] for v in block)
        out += [F(math.copysign(s * scale, v)) for s, v in zip(sizes, block, strict=True)]
    return out


def turboquant_values(x, bits):
    top = 2**bits - 1
    step = max(F(F(x.max() - x.min()) / F(top)), F(1e-8))
    codes = [min(max(int(F(F(F(v - x.min()) / step) + F(0.5))), 0), top) for v in x]
    held = F(np.float16(step)), F(np.float16(x.min()))
    return [F(F(F(c) * held[0]) + held[1]) for c in codes]


def turboquant_keys(x, bits):
    """Of a rotated key; sums are rounded once."""
    found = centroids(D, bits)
    length = F(math.sqrt(math.fsum(float(v) ** 2 for v in x)))
    y = [F(v / F(length + F(1e-8))) for v in x]
    middles = [F(F(a + b) / F(2)) for a, b in itertools.pairwise(found)]
    near = [found[sum(v >= m for m in middles)] for v in y]
    squares = F(math.fsum(float(c) ** 2 for c in near))
    inverse = F(F(1) / np.sqrt(F(squares + F(1e-16))))
    return [F(F(np.float16(length)) * F(c * inverse)) for c in near]


@cache
def centroids(dim, bits):
    """Lloyd's iteration in plain Python."""
    sigma, count = math.sqrt(1 / dim), 2**bits
    found = [sigma * (-3.5 + 7 * (i + 0.5) / count) for i in range(count)]

    def density(x):
        return math.exp(-x * x / (2 * sigma**2)) / math.sqrt(2 * math.pi * sigma**2)

    def integral(f, a, b):
        h = (b - a) / 200
        return h * (f(a) / 2 + sum(f(a + i * h) for i in range(1, 200)) + f(b) / 2)

    for _ in range(200):
        inner = [(a + b) / 2 for a, b in itertools.pairwise(found)]
        edges = [-10.5 * sigma, *inner, 10.5 * sigma]
        new = [
            integral(lambda x: x * density(x), a, b) / integral(density, a, b)
            for a, b in itertools.pairwise(edges)
        ]
        if max(abs(a - b) for a, b in zip(new, found, strict=True)) < 1e-10:
            break
        found = new
    return [F(x) for x in found]


FORMATS = [  # levels, bits, the reading, bytes of a head as vLLM allocates them
    ("vllm-int", 8, int8, D + 4),
    ("vllm-int", 4, int4, D // 2 + 4),
    ("vllm-fp8", 8, fp8, D + 4),
    ("nvfp4", 4, nvfp4, D // 2 + D // 16),
    ("turboquant-v", 4, lambda x: turboquant_values(x, 4), D // 2 + 4),
    ("turboquant-v", 3, lambda x: turboquant_values(x, 3), 3 * D // 8 + 4),
    ("turboquant-k", 4, lambda x: turboquant_keys(x, 4), D // 2 + 2),
    ("turboquant-k", 3, lambda x: turboquant_keys(x, 3), 3 * D // 8 + 2),
]


@pytest.mark.parametrize(("name", "bits", "read", "size"), FORMATS)
def test_what_comes_back_is_what_vllm_defines(name, bits, read, size):
    x, fmt = heads(), Format(bits, CODEBOOKS[name].group or D, name)
    with np.errstate(under="ignore"):
        want = np.array([read(row) for row in x], F)
    packed = quantize(torch.from_numpy(x), fmt)
    assert packed.nbytes == len(x) * size
    for got in (dequantize(packed, fmt), fake_quantize(torch.from_numpy(x), fmt)):
        assert np.array_equal(got.numpy(), want)


def test_signs_are_those_that_torch_draws_for_vllm():
    for block, bits in SIGNS.items():
        found = _signs_on(block, torch.device("cpu")).tolist()
        assert int("".join("1" if s > 0 else "0" for s in found), 2) == bits


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_levels_of_turboquant_are_those_of_its_iteration(dim, bits):
    assert np.array_equal(levels(dim, bits), centroids(dim, bits))


@pytest.mark.parametrize("bits", [4, 3])
def test_keys_of_turboquant_are_rotated_like_vllms(bits):
    """It divides by the length and then multiplies with a matrix: codes may part at a middle."""
    x = heads()[:200].astype(np.float64)
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(D)] for i in range(D)]) / D**0.5
    length = np.linalg.norm(x, axis=1, keepdims=True)
    y, found = x / (length + 1e-8) @ matrix, np.array(centroids(D, bits), np.float64)
    middles = (found[1:] + found[:-1]) / 2
    got, _ = CODEBOOKS["turboquant-k"].encode(hadamard(torch.from_numpy(x).float()), bits)
    clear = (np.abs(y[..., None] - middles) > 1e-6).all(-1)
    assert clear.mean() > 0.99
    assert np.array_equal(got.numpy()[clear], (y[..., None] >= middles).sum(-1)[clear])
