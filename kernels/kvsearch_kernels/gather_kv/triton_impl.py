"""Triton implementation of `gather_kv`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.configs import GATHER_ROWS, GATHER_WARPS
from kvsearch_kernels.gather_kv.reference import angles
from kvsearch_kernels.launch import (
    DTYPES,
    FUSED,
    HEAD_DIMS,
    ceil_div,
    check_slots,
    emulated,
    on,
    rows_last,
    why_not_here,
    why_not_slots,
)

__all__ = ["emulated", "forward", "why_not"]

MOST_WIDE = 1024  # elements of a row that is only copied


def why_not(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(x, slots, *(t for t in (by, inv_freq) if t is not None)):
        return reason
    if x.dim() != 4:
        return f"x must have 4 axes, got shape {tuple(x.shape)}"
    if by is None and x.dtype is torch.uint8:
        pass  # codes: bytes are copied as they are
    elif x.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {x.dtype}"
    if by is None and not 1 <= x.shape[-1] <= MOST_WIDE:
        return f"rows must have 1 to {MOST_WIDE} elements, got {x.shape[-1]}"
    if by is not None and x.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, got {x.shape[-1]}"
    if (by is None) != (inv_freq is None):
        return "by and inv_freq must be given together, got one of them"
    if by is not None and inv_freq is not None:
        if by.shape[-1] != slots.shape[-1] or by.dim() not in (1, 3):
            return f"by must have shape [n] or [B, H, n], got {tuple(by.shape)}"
        if inv_freq.dim() != 1:
            return "angles of each head have no kernel yet"
        if not 1 <= inv_freq.shape[0] <= x.shape[-1] // 2:
            return f"inv_freq must have 1 to {x.shape[-1] // 2} angles, got {inv_freq.shape[0]}"
    return why_not_slots(x, slots)


def forward(
    x: Tensor, slots: Tensor, *, by: Tensor | None = None, inv_freq: Tensor | None = None
) -> Tensor:
    """As `reference`."""
    from kvsearch_kernels.gather_kv.triton_kernels import gather

    B, H, N, D = x.shape
    n = slots.shape[-1]
    out = torch.empty(B, H, n, D, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    check_slots(slots, N)
    x, picks = rows_last(x), slots.expand(B, H, n)
    cos = sin = x  # never read without an angle
    strides, half = (0, 0, 0), 1
    if by is not None and inv_freq is not None:
        cos, sin = angles(by, inv_freq, torch.float32)
        half = inv_freq.shape[0]
        wide = cos.expand(B, H, n, half)
        strides = (wide.stride(0), wide.stride(1), wide.stride(2))
    with on(x.device):
        gather[(ceil_div(n, GATHER_ROWS), B * H)](
            x, picks, cos, sin, out, *x.stride()[:3], *picks.stride()[:3], *strides, n, H,
            D=D, PAD=1 << (D - 1).bit_length(), HALF=half, WIDE=1 << (half - 1).bit_length(),
            TURN=by is not None, BT=GATHER_ROWS, **FUSED, num_warps=GATHER_WARPS,
        )  # fmt: skip
    return out
