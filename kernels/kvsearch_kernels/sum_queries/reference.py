"""Meaning of `sum_queries`."""

import torch
from torch import Tensor

from kvsearch_kernels.decode_step.turned import plain_waves
from kvsearch_kernels.gather_kv.reference import turned


def reference(
    q: Tensor,
    total: Tensor,
    outer: Tensor | None,
    inv_freq: Tensor,
    lengths: Tensor,
    ahead: Tensor,
    *,
    skip: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Add one token's queries to `total`, and their products with themselves to `outer`, in place.

    The queries lose the angle that the model gave them at their position in the stream, which is
    `ahead + lengths`: both are read on the device, so that no argument of a launch changes from
    token to token, nor across compactions.

    Args:
        q: queries `[B, Hq, D]`, turned by the model.
        total: sums `[B, Hq, D]` fp32.
        outer: sums of products `[B, Hq, D (D + 1) / 2]` fp32: the upper triangle, row by row.
        inv_freq: angle per position of each channel pair, fp32 `[R / 2]`.
        lengths: slots in use of the newest part before the token `[B, H]` int32, alike in all.
        ahead: position of a token that finds that part empty, `[1]` int32.
        skip: first tokens of the stream that are not added.

    Returns:
        `total` and `outer`.
    """
    at = lengths.flatten()[:1].long() + ahead
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    plain = turned(wide.unsqueeze(2), *plain_waves(at, inv_freq, q.dtype)).squeeze(2)
    plain = plain.to(q.dtype).to(total.dtype) * (at >= skip)
    total.add_(plain)
    if outer is not None:
        i, j = torch.triu_indices(q.shape[-1], q.shape[-1], device=q.device)
        outer.add_(plain[..., i] * plain[..., j])
    return total, outer


def why_not_sums(
    q: Tensor, sums: list[Tensor], inv_freq: Tensor, lengths: Tensor, ahead: Tensor
) -> str | None:
    """Reason why these sums do not fit the queries `[B, Hq, D]`, or None."""
    B, Hq, D = q.shape
    for x, n in zip(sums, (D, D * (D + 1) // 2), strict=False):
        if x.shape != (B, Hq, n) or x.dtype is not torch.float32 or not x.is_contiguous():
            return f"sums must be [{B}, {Hq}, {n}] float32, contiguous, got {tuple(x.shape)}"
    if inv_freq.dim() != 1 or 2 * inv_freq.shape[0] > D or not inv_freq.is_contiguous():
        return f"angles must be [{D // 2}] or fewer, contiguous, got {tuple(inv_freq.shape)}"
    if inv_freq.dtype is not torch.float32:
        return f"angles must be float32, got {inv_freq.dtype}"
    for what, x in (("lengths", lengths), ("ahead", ahead)):
        if x.dtype is not torch.int32 or not x.numel():
            return f"{what} must be int32, at least one, got {tuple(x.shape)} {x.dtype}"
    return None
