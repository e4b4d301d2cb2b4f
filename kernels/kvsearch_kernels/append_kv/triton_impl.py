"""Triton implementation of `append_kv`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.append_kv.reference import check_room
from kvsearch_kernels.launch import DTYPES, FUSED, emulated, on, rows_last, why_not_here

__all__ = ["emulated", "forward", "why_not"]

MOST_WIDE = 1024  # channels of a vector
MOST_TOKENS = 64  # one program writes all tokens of a head


def why_not(keys: Tensor, values: Tensor, lengths: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(keys, values, lengths, k, v):
        return reason
    B, H, M = k.shape[:3]
    if lengths.shape != (B, H) or lengths.dtype is not torch.int32 or not lengths.is_contiguous():
        return f"lengths must be [{B}, {H}] int32, got {tuple(lengths.shape)} {lengths.dtype}"
    if M > MOST_TOKENS or B * H > 65535:
        return f"there must be at most {MOST_TOKENS} tokens and 65535 heads, got {M} and {B * H}"
    for what, pool, new in (("keys", keys, k), ("values", values, v)):
        if pool.dtype not in DTYPES or new.dtype not in DTYPES:
            return f"{what} must be float16, bfloat16 or float32, got {pool.dtype} and {new.dtype}"
        if not pool.is_contiguous() or pool.shape[:2] != (B, H):
            return f"pools of {what} must be contiguous [{B}, {H}, C, D], got {tuple(pool.shape)}"
        if new.shape != (B, H, M, pool.shape[3]) or not 1 <= pool.shape[3] <= MOST_WIDE:
            return f"{what} must be [{B}, {H}, {M}, 1 to {MOST_WIDE}], got {tuple(new.shape)}"
    return None


def forward(
    keys: Tensor, values: Tensor, lengths: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference`."""
    from kvsearch_kernels.append_kv.triton_kernels import append

    check_room(keys, lengths, k)
    B, H, C, D = keys.shape
    wide = values.shape[3]
    k, v = rows_last(k), rows_last(v)
    if k.numel():
        with on(keys.device):
            append[(B * H,)](
                keys, values, lengths, k, v, *k.stride()[:3], *v.stride()[:3], H, C, k.shape[2],
                D=D, PAD=1 << (D - 1).bit_length(), DV=wide, PADV=1 << (wide - 1).bit_length(),
                **FUSED, num_warps=1,
            )  # fmt: skip
    return keys, values, lengths
