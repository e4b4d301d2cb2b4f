"""Meaning of `gather_kv`."""

import torch
from torch import Tensor

from kvsearch_kernels.launch import check_slots


def reference(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> Tensor:
    """Copy slots `slots` of `x` to a new tensor, optionally turned by an angle.

    The copy goes to new memory: in place, one program could overwrite what another still reads.

    Args:
        x: keys or values `[B, H, N, D]`, or any rows held per slot, such as codes and scales.
        slots: which of the N tokens, in the order of the result, `[n]` or per head
            `[B or 1, H or 1, n]`, int32 or int64.
        by: positions to move each copied key by (new minus old), in the shapes of `slots`; needs
            `inv_freq`. None copies.
        inv_freq: angle per position of each channel pair, `[R / 2]` in radians, or per head
            `[H, R / 2]`; RoPE in the half-split layout turns channels i and i + R / 2, those from
            `R` on stay.

    Returns:
        `[B, H, n, D]`; turned in fp32 (fp64 of fp64) and rounded once to the type of `x`.
    """
    check_slots(slots, x.shape[2])
    index = slots.long()
    if index.dim() == 1:
        kept = x.index_select(2, index)
    else:
        index = index.expand(*x.shape[:2], index.shape[-1]).unsqueeze(-1)
        kept = x.gather(2, index.expand(*index.shape[:3], x.shape[-1]))
    if by is None or inv_freq is None:
        return kept
    return turned(kept, *angles(by, inv_freq, torch.promote_types(x.dtype, torch.float32)))


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
