"""Which parts the Triton kernels cannot read, in one sentence."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.launch import DTYPES, HEAD_DIMS, why_not_here
from kvsearch_kernels.packed_attention.reference import Part
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import steps_of
from kvsearch_kernels.quantize_kv.triton_inverse import why_not_packed

MOST_PARTS = 4


def _why_not_held(
    what: str, held: Tensor | Packed, fmt: Format | None, q: Tensor, shape: tuple[int, int, int],
    *, keys: bool,
) -> str | None:  # fmt: skip
    """Reason why the keys or values of a part cannot be read, or None; keys may be in groups."""
    if isinstance(held, Packed) != (fmt is not None):
        return f"{what} must be packed exactly when they have a format, got format {fmt}"
    D = q.shape[-1]
    if isinstance(held, Packed):
        assert fmt is not None
        reason = why_not_here(q, held.codes, held.scales)
        if reason or (reason := why_not_packed(held, fmt, grouped=keys)):
            return f"{what}: {reason}"
        if held.codes.data_ptr() % 2 or held.scales.data_ptr() % 4:  # read as words
            return f"{what} must start at an even address, and their scales at a multiple of 4"
        got = (*held.codes.shape[:-1], held.codes.shape[-1] * 8 // fmt.bits)
    else:
        if reason := why_not_here(q, held):
            return reason
        if held.dtype is not q.dtype and not (
            q.dtype is torch.float32 and held.dtype in (torch.float16, torch.bfloat16)
        ):  # an fp32 model holds its cache in 16 bits
            return f"{what} must have the dtype of the queries, {q.dtype}, got {held.dtype}"
        got = tuple(held.shape)
    wanted = (*shape, D)
    return None if got == wanted else f"{what} must have shape {wanted}, got {got}"


def why_not_parts(
    q: Tensor, parts: Sequence[Part], scale: float, softcap: float | None
) -> str | None:
    """Reason why queries `[B, Hq, D]` cannot attend to these parts, or None."""
    if reason := why_not_here(q):
        return reason
    if q.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {q.dtype}"
    if q.dim() != 3 or q.shape[-1] not in HEAD_DIMS:
        return f"q must be [B, Hq, 64, 128 or 256], got shape {tuple(q.shape)}"
    if not 1 <= len(parts) <= MOST_PARTS:
        return f"there must be 1 to {MOST_PARTS} parts, got {len(parts)}"
    B, Hq = q.shape[:2]
    for i, part in enumerate(parts):
        held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
        if held.dim() != 4 or held.shape[1] == 0 or Hq % held.shape[1]:
            return f"KV heads must divide {Hq} query heads, got keys {tuple(held.shape)}"
        most = 32 if q.dtype == torch.float32 else 64  # else some GPUs lack shared memory
        if Hq // held.shape[1] > most:
            return f"query heads per KV head must be at most {most}, got {Hq // held.shape[1]}"
        if B * held.shape[1] > 65535:
            return f"batch x KV heads must be at most 65535, got {B * held.shape[1]}"
        shape = (B, held.shape[1], held.shape[2])
        first = parts[0].keys.codes if isinstance(parts[0].keys, Packed) else parts[0].keys
        if held.shape[1] != first.shape[1]:
            return f"parts differ in KV heads, {first.shape[1]} and {held.shape[1]}"
        reason = _why_not_held(
            f"keys of part {i}", part.keys, part.key_format, q, shape, keys=True
        ) or _why_not_held(
            f"values of part {i}", part.values, part.value_format, q, shape, keys=False
        )
        if reason:
            return reason
        if part.lengths is not None and part.lengths.shape != shape[:2]:
            return f"lengths must have shape {shape[:2]}, got {tuple(part.lengths.shape)}"
    if reason := why_not_turned(parts, q.shape[-1]):
        return reason
    if not scale > 0:
        return f"scale must be above 0, got {scale}"
    if softcap is not None and not softcap > 0:
        return f"softcap must be above 0, got {softcap}"
    return None


def turns_of(parts: Iterable[Part], D: int) -> tuple[list[int], list[int]]:
    """Different `steps_of` the rotations of keys, and of values; of none there are no steps."""
    formats = [(p.key_format, p.value_format) for p in parts]
    keys, values = ({steps_of(pair[side], D) for pair in formats} - {0} for side in (0, 1))
    return sorted(keys), sorted(values)


def why_not_turned(parts: Iterable[Part], D: int) -> str | None:
    """Reason why one rotation of the queries, and one of the output, do not serve all parts."""
    for what, steps in zip(("keys", "values"), turns_of(parts, D), strict=True):
        if len(steps) > 1:
            blocks = [1 << s for s in steps]
            return f"rotated {what} must mix as many channels in all parts, got {blocks}"
    return None
