"""Triton implementation of `dequantize_kv`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.configs import QUANTIZE_ROWS, QUANTIZE_WARPS
from kvsearch_kernels.launch import DTYPES, FUSED, ceil_div, emulated, on, why_not_here
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import (
    constants,
    tables,
    why_not_codes,
    why_not_format,
)

__all__ = ["emulated", "forward", "why_not", "why_not_packed"]


def why_not_packed(packed: Packed, fmt: Format, *, grouped: bool = False) -> str | None:
    """Reason why codes and scales do not fit their format, or None.

    `grouped` says that groups may be along tokens.
    """
    if packed.codes.dtype is not torch.uint8 or packed.scales.dtype is not torch.float16:
        return (
            "codes and scales must be uint8 and float16, "
            f"got {packed.codes.dtype} and {packed.scales.dtype}"
        )
    D = packed.codes.shape[-1] * 8 // fmt.bits
    along = grouped and fmt.along == "tokens"
    if reason := (why_not_codes if along else why_not_format)(fmt, D):
        return reason
    wanted = (*packed.codes.shape[:-1], D // fmt.group, fmt.numbers)
    if along:
        tokens = packed.codes.shape[2] + packed.lead
        wanted = (*packed.codes.shape[:2], ceil_div(tokens, fmt.group), D, fmt.numbers)
    if packed.scales.shape != wanted:
        return f"scales must have shape {wanted}, got {tuple(packed.scales.shape)}"
    return None


def why_not(packed: Packed, fmt: Format, *, dtype: torch.dtype = torch.float32) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(packed.codes, packed.scales):
        return reason
    if dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {dtype}"
    if dtype is torch.bfloat16 and emulated():
        return "the Triton interpreter computes torch.bfloat16 wrongly"
    return why_not_packed(packed, fmt)


def forward(packed: Packed, fmt: Format, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `reference.dequantize_slots`."""
    from kvsearch_kernels.quantize_kv.triton_kernels import dequantize

    codes, scales = packed.codes.contiguous(), packed.scales.contiguous()
    D = codes.shape[-1] * 8 // fmt.bits
    out = torch.empty(*codes.shape[:-1], D, dtype=dtype, device=codes.device)
    if out.numel() == 0:
        return out
    n = out.numel() // D
    levels, _ = tables(fmt.bits, codes.device)
    with on(out.device):
        dequantize[(ceil_div(n, QUANTIZE_ROWS),)](
            codes, scales, levels, out, n, **constants(fmt, D), BT=QUANTIZE_ROWS,
            **FUSED, num_warps=QUANTIZE_WARPS,
        )  # fmt: skip
    return out
