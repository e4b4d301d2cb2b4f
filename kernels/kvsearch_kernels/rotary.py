"""Rotary position embeddings in the half-split layout (RoPE, arXiv:2104.09864)."""

import torch
from torch import Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Channels i and i + R / 2 of `x` `[..., D]`, turned by an angle; those from `R` on stay.

    `cos` and `sin` are `[..., R / 2]`. Products take the wider type, and the result is rounded
    once, to that of `x`.
    """
    half = cos.shape[-1]
    a, b, rest = x.tensor_split([half, 2 * half], -1)
    pairs = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([pairs, rest], -1) if rest.shape[-1] else pairs


def angles(by: Tensor, inv_freq: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., n, R / 2]` of type `kind` of moving by `by` positions `[..., n]`.

    The angle itself is exact: at position 100,000 its fp32 would be off by 0.004 radians.
    """
    per_pair = inv_freq.to(by.device, torch.float64)
    if per_pair.dim() == 2:  # a row of its own for each head
        per_pair = per_pair.unsqueeze(-2)
    angle = by.double().unsqueeze(-1) * per_pair
    return angle.cos().to(kind), angle.sin().to(kind)
