"""What the loops for a CPU are given of parts, and which they cannot read; imports no numba."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kvsearch_kernels.numba_args import (
    KINDS,
    Integers,
    side,
    why_not_memory,
    why_not_packed,
)
from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.quantize_kv.reference import Format, Packed


def why_not_parts(q: Tensor, parts: Sequence[Part], softcap: float | None) -> str | None:
    """Reason why queries `[B, Hq, D]` cannot attend to these parts, or None."""
    if reason := why_not_memory(q):
        return reason
    if q.dtype not in KINDS or q.dim() != 3:
        return f"q must be [B, Hq, D] of floating-point numbers, got {tuple(q.shape)} {q.dtype}"
    if not parts:
        return "there must be at least one part"
    if softcap is not None and not softcap > 0:
        return f"softcap must be above 0, got {softcap}"
    heads, width = _tensor(parts[0].keys).shape[1], _width(parts[0].values, parts[0].value_format)
    B, Hq, D = q.shape
    if heads == 0 or Hq % heads:
        return f"KV heads must divide {Hq} query heads, got {heads}"
    for i, part in enumerate(parts):
        if part.known.get("taken by numba") != (B, heads, D, width):
            if reason := _why_not_part(part, B, heads, D, width):
                return f"part {i}: {reason}"
            part.known["taken by numba"] = (B, heads, D, width)
    return None


def _why_not_part(part: Part, B: int, heads: int, D: int, width: int) -> str | None:
    """Reason why keys or values of a part cannot be read, or None."""
    shape, used = (B, heads, slots_of(part)), part.lengths
    if reason := _why_not_held(part.keys, part.key_format, (*shape, D)):
        return f"keys: {reason}"
    if reason := _why_not_held(part.values, part.value_format, (*shape, width)):
        return f"values: {reason}"
    if used is not None and used.shape != shape[:2]:
        return f"lengths must have shape {shape[:2]}, got {tuple(used.shape)}"
    return None if used is None else why_not_memory(used)


def _why_not_held(
    held: Tensor | Packed, fmt: Format | None, wanted: tuple[int, int, int, int]
) -> str | None:
    """Reason why keys or values that should be `wanted` cannot be read, or None."""
    if isinstance(held, Packed) != (fmt is not None):
        return f"they must be packed exactly when they have a format, got format {fmt}"
    got = (*_tensor(held).shape[:3], _width(held, fmt))
    if got != wanted:
        return f"their shape must be {wanted}, got {got}"
    if isinstance(held, Tensor):
        if held.dtype not in KINDS:
            return f"there is no loop for {held.dtype}"
        return why_not_memory(held)
    assert fmt is not None
    return why_not_packed(held, fmt)


def row_of_part(part: Part) -> Integers:
    """The integers of a part; they point into tensors that the part holds."""
    row: Integers | None = part.known.get("row of numba")
    if row is None:
        used = None if part.lengths is None else part.lengths.int().contiguous()
        keys, values = side(part.keys, part.key_format), side(part.values, part.value_format)
        at = 0 if used is None else used.data_ptr()
        row = np.array((*keys, *values, slots_of(part), at), dtype=np.int64)
        part.known["row of numba"], part.known["lengths of numba"] = row, used  # which it points to
    return row


def _tensor(held: Tensor | Packed) -> Tensor:
    return held.codes if isinstance(held, Packed) else held


def _width(held: Tensor | Packed, fmt: Format | None) -> int:
    """Channels of a vector."""
    return _tensor(held).shape[3] * 8 // (8 if fmt is None else fmt.bits)
