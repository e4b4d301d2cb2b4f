"""Triton implementation of `tally`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.configs import RECEIVE_COLUMNS, RECEIVE_WARPS
from kvsearch_kernels.launch import FUSED, ceil_div, emulated, on, why_not_here

__all__ = ["emulated", "forward", "why_not"]


def why_not(
    sums: Tensor,
    received: Tensor,
    order: Tensor | None,
    lengths: Tensor,
    *,
    held: int,
    end: int = 0,
    alpha: float = 0.0,
    horizon: int | None = None,
    keep: float = 1.0,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    given = (sums, received, lengths, *([] if order is None else [order]))
    if reason := why_not_here(*given):
        return reason
    if sums.dtype is not torch.float32 or received.dtype is not torch.float32:
        return f"sums and received must be float32, got {sums.dtype} and {received.dtype}"
    B, H, N = received.shape
    if sums.shape not in ((B, H, N), (B, 1, N)) or sums.stride(-1) != 1:
        return f"sums must be [{B}, {H} or 1, {N}], rows contiguous, got {tuple(sums.shape)}"
    if not received.is_contiguous():
        return "received must be contiguous"
    if lengths.shape != (B, H) or lengths.dtype is not torch.int32:
        return f"lengths must be [{B}, {H}] int32, got {tuple(lengths.shape)} {lengths.dtype}"
    if order is None:
        return None
    if order.dtype is not torch.int64 or order.shape[-1] != N or order.dim() not in (1, 3):
        return f"order must be [{N}] or [B, V, {N}] int64, got {tuple(order.shape)} {order.dtype}"
    if order.dim() == 3 and (order.shape[0] not in (1, B) or order.shape[1] not in (1, H)):
        return f"order must be [{B} or 1, {H} or 1, {N}], got {tuple(order.shape)}"
    return None


def forward(
    sums: Tensor,
    received: Tensor,
    order: Tensor | None,
    lengths: Tensor,
    *,
    held: int,
    end: int = 0,
    alpha: float = 0.0,
    horizon: int | None = None,
    keep: float = 1.0,
) -> Tensor:
    """As `reference`."""
    from kvsearch_kernels.tally.triton_kernels import add

    B, H, N = received.shape
    V = sums.shape[1]
    if sums.numel() == 0:
        return sums
    picks = received if order is None else order.expand(B, H, N)  # never read without ORDER
    power = {0.0: 0, 1.0: 1}.get(alpha, 2)
    with on(sums.device):
        add[(ceil_div(N, RECEIVE_COLUMNS), B * V)](
            sums, received, picks, lengths, *sums.stride()[:2], *picks.stride()[:3],
            N, V, H // V, held, end, 0 if horizon is None else horizon, float(alpha), float(keep),
            POWER=power, WINDOW=horizon is not None, DECAY=keep != 1.0, ORDER=order is not None,
            BN=RECEIVE_COLUMNS, **FUSED, num_warps=RECEIVE_WARPS,
        )  # fmt: skip
    return sums
