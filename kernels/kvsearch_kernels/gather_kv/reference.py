"""Meaning of `gather_kv`."""

import torch
from torch import Tensor


def reference(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> Tensor:
    """Copy slots `slots` of `x` to a new tensor, optionally turned by an angle.

    The copy goes to new memory: in place, one program could overwrite what another still reads.

    Args:
        x: keys or values `[B, H, N, D]`.
        slots: which of the N tokens, in the order of the result, `[n]` or per head
            `[B or 1, H or 1, n]`, int32 or int64.
        by: positions to move each copied key by (new minus old), in the shapes of `slots`; needs
            `inv_freq`. None copies.
        inv_freq: angle per position of each channel pair, `[R / 2]` in radians; RoPE in the
            half-split layout turns channels i and i + R / 2, those from `R` on stay.

    Returns:
        `[B, H, n, D]`; turned in fp32 and rounded once to the type of `x`.
    """
    index = slots.long().expand(*x.shape[:2], slots.shape[-1]).unsqueeze(-1)
    kept = x.gather(2, index.expand(*index.shape[:3], x.shape[-1]))
    if by is None or inv_freq is None:
        return kept
    cos, sin = angles(by, inv_freq)
    half = inv_freq.shape[0]
    kind = torch.promote_types(x.dtype, torch.float32)
    a, b, rest = kept.to(kind).tensor_split([half, 2 * half], -1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return torch.cat([turned, rest.to(x.dtype)], -1)


def angles(by: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., n, R / 2]` fp32 of moving by `by` positions `[..., n]`."""
    angle = by.float().unsqueeze(-1) * inv_freq.to(by.device, torch.float32)
    return angle.cos(), angle.sin()
