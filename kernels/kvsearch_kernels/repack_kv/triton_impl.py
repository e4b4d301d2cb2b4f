"""Triton implementation of `repack_kv`: one launch for keys and values, from all parts.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.configs import REPACK_ROWS, REPACK_WARPS
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.decode_attention.triton_impl import MOST_PARTS, levels_on, pools_of
from kvsearch_kernels.launch import (
    DTYPES,
    HEAD_DIMS,
    ceil_div,
    check_slots,
    emulated,
    on,
    why_not_here,
    why_not_slots,
)
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import tables, why_not_format
from kvsearch_kernels.quantize_kv.triton_inverse import why_not_packed
from kvsearch_kernels.repack_kv.reference import Held

__all__ = ["emulated", "forward", "why_not"]


def why_not(
    source: Tensor,
    parts: Sequence[Part],
    own: int | None,
    formats: tuple[Format | None, Format | None],
    *,
    dtype: torch.dtype,
    native: torch.dtype,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if not 1 <= len(parts) <= MOST_PARTS:
        return f"there must be 1 to {MOST_PARTS} parts, got {len(parts)}"
    if dtype not in DTYPES or native not in DTYPES:
        return f"types must be float16, bfloat16 or float32, got {dtype} and {native}"
    shape: torch.Size | None = None
    for i, part in enumerate(parts):
        if part.lengths is not None:
            return f"part {i} has lengths"
        sides = ((part.keys, part.key_format), (part.values, part.value_format))
        for held, fmt in sides:
            if reason := _why_not_held(held, fmt, source):
                return f"part {i}: {reason}"
            x = held.codes if isinstance(held, Packed) else held
            wide = x.shape[-1] * 8 // (8 if fmt is None else fmt.bits)
            now = torch.Size((*x.shape[:2], wide))
            if shape is not None and now != shape:
                return f"keys and values of all parts must be alike, got {shape} and {now}"
            shape = now
            if x.shape[2] == 0:
                return f"part {i} is empty"
        if i == own and (part.key_format, part.value_format) != formats:
            return f"part {i} is not in the format of the result"
    assert shape is not None
    if shape[0] * shape[1] > 65535:
        return f"batch x KV heads must be at most 65535, got {shape[0] * shape[1]}"
    for fmt in formats:
        if fmt is not None and (reason := why_not_format(fmt, shape[2])):
            return reason
    first = parts[0].keys
    x = first.codes if isinstance(first, Packed) else first
    return "source must be int64" if source.dtype is not torch.int64 else why_not_slots(x, source)


def _why_not_held(held: Held, fmt: Format | None, source: Tensor) -> str | None:
    """Reason why what is held cannot be read, or None."""
    if isinstance(held, Packed) != (fmt is not None):
        return f"it must be packed exactly when it has a format, got format {fmt}"
    if isinstance(held, Packed):
        assert fmt is not None
        return why_not_here(source, held.codes, held.scales) or why_not_packed(held, fmt)
    if held.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {held.dtype}"
    if held.dim() != 4 or held.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, got {held.shape[-1]}"
    return why_not_here(source, held)


def constants(side: str, i: int | str, fmt: Format | None, D: int) -> dict[str, int | bool]:
    """Compile-time arguments of keys (`K`) or values (`V`) of a part, or of the result (`T`)."""
    if fmt is None:
        return {f"{side}B{i}": 16, f"{side}G{i}": D, f"{side}L{i}": False, f"{side}R{i}": False}
    return {
        f"{side}B{i}": fmt.bits, f"{side}G{i}": fmt.group, f"{side}L{i}": fmt.levels == "lloyd",
        f"{side}R{i}": fmt.rotate,
    }  # fmt: skip


def forward(
    source: Tensor,
    parts: Sequence[Part],
    own: int | None,
    formats: tuple[Format | None, Format | None],
    *,
    dtype: torch.dtype,
    native: torch.dtype,
) -> tuple[Held, Held]:
    """As `reference`."""
    from kvsearch_kernels.repack_kv.triton_kernels import repack

    found = [(p, *pools_of(p)) for p in parts]
    x = found[0][1][0]
    B, H, device = x.shape[0], x.shape[1], x.device
    first = parts[0]
    D = x.shape[-1] * 8 // (8 if first.key_format is None else first.key_format.bits)
    n = source.shape[-1]
    check_slots(source, sum(pools[0].shape[2] for _, pools, _ in found))
    made: list[Held] = [_empty(fmt, (B, H, n), D, native, device) for fmt in formats]
    if n == 0:
        return made[0], made[1]
    picks = source.expand(B, H, n)
    args: list[Tensor | int] = []
    fixed: dict[str, int | bool] = {}
    start = 0
    for i in range(MOST_PARTS):  # the kernel takes as many: the last again, never read
        part, pools, capacity = found[min(i, len(found) - 1)]
        held = pools[0].shape[2]
        args += [*pools, capacity, start, held]
        start += held
        fixed |= constants("K", i, part.key_format, D) | constants("V", i, part.value_format, D)
    outs: list[Tensor] = []
    for held_side, fmt in zip(made, formats, strict=True):
        low = isinstance(held_side, Packed)
        outs += [held_side.codes, held_side.scales] if low else [held_side, held_side]  # type: ignore[union-attr,list-item]
        outs += tables(1 if fmt is None else fmt.bits, device)
    fixed |= constants("K", "T", formats[0], D) | constants("V", "T", formats[1], D)
    with on(device):
        repack[(ceil_div(n, REPACK_ROWS), B * H, 2)](
            *args, *outs, picks, levels_on(device), torch.empty(0, dtype=dtype, device=device),
            *picks.stride()[:3], n, H,
            D=D, PARTS=len(found), OWN=-1 if own is None else own, BT=REPACK_ROWS,
            STEPS=D.bit_length() - 1, NORM=D**-0.5, **fixed, num_warps=REPACK_WARPS,
        )  # fmt: skip
    return made[0], made[1]


def _empty(
    fmt: Format | None, shape: tuple[int, int, int], D: int, native: torch.dtype,
    device: torch.device,
) -> Held:  # fmt: skip
    """Memory for keys or values of the result."""
    if fmt is None:
        return torch.empty(*shape, D, dtype=native, device=device)
    codes = torch.empty(*shape, D * fmt.bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(*shape, D // fmt.group, fmt.numbers, dtype=torch.float16, device=device)
    return Packed(codes, scales)
