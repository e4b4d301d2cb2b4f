"""Triton implementation of `quantize_kv`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.codebooks.gaussian import lloyd_levels_on
from kvsearch_kernels.configs import QUANTIZE_ROWS, QUANTIZE_WARPS
from kvsearch_kernels.launch import (
    DTYPES,
    FUSED,
    HEAD_DIMS,
    ceil_div,
    emulated,
    on,
    rows_last,
    why_not_here,
)
from kvsearch_kernels.quantize_kv.reference import Format, Packed, rotation_block

__all__ = ["emulated", "forward", "why_not"]

_tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def tables(bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lloyd-Max levels `[2**bits]` and the edges between them, kept on the device."""
    key = bits, device
    if key not in _tables:
        levels = lloyd_levels_on(bits, device)
        _tables[key] = levels, (levels[1:] + levels[:-1]) / 2
    return _tables[key]


def steps_of(fmt: Format | None, D: int) -> int:
    """Logarithm of the channels, of `D`, that a rotation mixes; 0 without one."""
    if fmt is None or not fmt.rotate:
        return 0
    return rotation_block(D, fmt.block).bit_length() - 1


def constants(fmt: Format, D: int) -> dict[str, object]:
    """Compile-time arguments that the kernels of both directions share."""
    return {
        "D": D, "GROUP": fmt.group, "BITS": fmt.bits, "LLOYD": fmt.levels == "lloyd",
        "STEPS": steps_of(fmt, D),
    }  # fmt: skip


def why_not_format(fmt: Format, D: int) -> str | None:
    """Reason why vectors of `D` channels in this format cannot be taken, or None."""
    if fmt.along != "channels":
        return "groups along tokens have no kernel yet"
    return why_not_codes(fmt, D)


def why_not_codes(fmt: Format, D: int) -> str | None:
    """The same, whatever its groups are along."""
    if D not in HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, got {D}"
    if fmt.bits not in (1, 2, 3, 4, 5, 8):
        return f"bits must be 1, 2, 3, 4, 5 or 8, got {fmt.bits}"
    if fmt.levels not in ("uniform", "lloyd"):
        return f"levels must be uniform or lloyd, got {fmt.levels!r}"
    most = D if fmt.along == "channels" else fmt.group
    if fmt.group < 1 or fmt.group & (fmt.group - 1) or fmt.group > most:
        return f"group must be a power of two that divides {D}, got {fmt.group}"
    if fmt.rotate and fmt.block is not None and (fmt.block < 2 or fmt.block & (fmt.block - 1)):
        return f"a rotation must mix a power of two of channels, got {fmt.block}"
    return None


def why_not(x: Tensor, fmt: Format) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(x):
        return reason
    if x.dim() != 4:
        return f"x must have 4 axes, got shape {tuple(x.shape)}"
    if x.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {x.dtype}"
    return why_not_format(fmt, x.shape[-1])


def forward(x: Tensor, fmt: Format) -> Packed:
    """As `reference.quantize`."""
    from kvsearch_kernels.quantize_kv.triton_kernels import quantize

    B, H, n, D = x.shape
    codes = torch.empty(B, H, n, D * fmt.bits // 8, dtype=torch.uint8, device=x.device)
    scales = torch.empty(B, H, n, D // fmt.group, fmt.numbers, dtype=torch.float16, device=x.device)
    if codes.numel() == 0:
        return Packed(codes, scales)
    x = rows_last(x)
    levels, edges = tables(fmt.bits, x.device)
    with on(x.device):
        quantize[(ceil_div(n, QUANTIZE_ROWS), B * H)](
            x, levels, edges, codes, scales, *x.stride()[:3], n, H,
            **constants(fmt, D), BT=QUANTIZE_ROWS, **FUSED, num_warps=QUANTIZE_WARPS,
        )  # fmt: skip
    return Packed(codes, scales)
