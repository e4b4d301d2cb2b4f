"""Implementation of `dequantize_kv` for a CPU, bit for bit the reference."""

import torch
from torch import Tensor

from kvsearch_kernels.numba_args import row_of, why_not_packed
from kvsearch_kernels.quantize_kv.reference import Format, Packed

__all__ = ["forward", "why_not"]


def why_not(packed: Packed, fmt: Format, *, dtype: torch.dtype = torch.float32) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    return why_not_packed(packed, fmt)


def forward(packed: Packed, fmt: Format, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `reference.dequantize_slots`."""
    from kvsearch_kernels.numba_loops.reading import dequantize

    B, H, n, size = packed.codes.shape
    out = torch.empty(B, H, n, size * 8 // fmt.bits, dtype=torch.float32, device="cpu")
    dequantize(row_of(packed, fmt), out.numpy())
    return out.to(dtype)
