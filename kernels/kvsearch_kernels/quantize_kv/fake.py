"""`fake_quantize` for evaluations on a CPU: bit for bit equal to the reference's, in less time.

Two steps of the reference are slow in torch: butterflies over neighbouring channels, whose vectors
are too short for a vector unit, and a binary search per channel.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvsearch_kernels.codebooks.gaussian import lloyd_levels
from kvsearch_kernels.codebooks.nearest import nearest_codes
from kvsearch_kernels.quantize_kv import reference
from kvsearch_kernels.quantize_kv.reference import Format

ROWS = 2048  # vectors transformed at once, so that both buffers stay in a core's cache


def fake_quantize(x: Tensor, fmt: Format) -> Tensor:
    """`dequantize(quantize(x, fmt), fmt)` in fp32, without packing."""
    if x.device.type != "cpu" or fmt.along == "tokens":
        return reference.fake_quantize(x, fmt)
    y = x.float()
    if fmt.rotate:
        y = hadamard(y, fmt.block)
    if fmt.levels == "lloyd":
        y = _nearest_levels(y, fmt)
    else:
        y = reference.fake_quantize(y, replace(fmt, rotate=False))
    return hadamard(y, fmt.block) if fmt.rotate else y


def hadamard(x: Tensor, most: int | None = None) -> Tensor:
    """`reference.hadamard` of fp32 `x`: the same sums, channel by channel over many vectors."""
    block = reference.rotation_block(x.shape[-1], most)
    vectors = x.reshape(-1, block)
    out = torch.empty_like(vectors)
    for start in range(0, len(vectors), ROWS):
        a = vectors[start : start + ROWS].t().clone(memory_format=torch.contiguous_format)
        b = torch.empty_like(a)
        step = 1
        while step < block:
            old, new = (y.view(block // (2 * step), 2, step, -1) for y in (a, b))
            torch.add(old[:, 0], old[:, 1], out=new[:, 0])
            torch.sub(old[:, 0], old[:, 1], out=new[:, 1])
            a, b = b, a
            step *= 2
        torch.mul(a.t(), block**-0.5, out=out[start : start + ROWS])
    return out.view(x.shape)


def _nearest_levels(x: Tensor, fmt: Format) -> Tensor:
    """Gaussian levels times their fitted scale, group by group, see `reference._encode`."""
    g = x.unflatten(-1, (x.shape[-1] // fmt.group, fmt.group))
    scale = g.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)
    codes = nearest_codes(g / scale, fmt.bits)
    fitted = lloyd_levels(fmt.bits).index_select(0, codes.view(-1)).view(g.shape)
    scale = (g * fitted).sum(-1, keepdim=True) / fitted.square().sum(-1, keepdim=True)
    return fitted.mul_(scale.to(torch.float16).float()).flatten(-2)
