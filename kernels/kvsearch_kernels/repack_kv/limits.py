"""What the Triton implementation of `repack_kv` cannot take, in one sentence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.launch import DTYPES, HEAD_DIMS, why_not_here, why_not_slots
from kvsearch_kernels.packed_attention.limits import MOST_PARTS
from kvsearch_kernels.packed_attention.reference import slots_of
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import why_not_format
from kvsearch_kernels.quantize_kv.triton_inverse import why_not_packed
from kvsearch_kernels.repack_kv.reference import Held, NewPool
from kvsearch_kernels.repack_kv.table import heads_of, kinds_of

# Formats in a layer: one quantiser has six widths, of keys and, rotated in blocks, of values, and
# there are 16 bits.
MOST_KINDS = 13
MOST_ROWS = 65535  # of a grid's second axis
MOST_PLACES = (1 << 31) - 1  # of a head, which are counted in 32 bits


def why_not(pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(*(pool.source for pool in pools)):
        return reason
    if dtype not in DTYPES or native not in DTYPES:
        return f"types must be float16, bfloat16 or float32, got {dtype} and {native}"
    for pool in pools:
        if reason := _why_not_pool(pool, native):
            return reason
    if len(found := {heads_of(pool)[2] for pool in pools}) > 1:
        return f"all pools must have as many channels, got {sorted(found)}"
    if (kinds := len(kinds_of(pools))) > MOST_KINDS:
        return f"there must be at most {MOST_KINDS} formats, got {kinds}"
    if (rows := sum(2 * B * H for B, H, _ in map(heads_of, pools))) > MOST_ROWS:
        return f"batch x KV heads of all pools must be at most {MOST_ROWS // 2}, got {rows // 2}"
    return None


def _why_not_pool(pool: NewPool, native: torch.dtype) -> str | None:
    """Reason why this pool cannot be made, or None."""
    if not 1 <= len(pool.parts) <= MOST_PARTS:
        return f"there must be 1 to {MOST_PARTS} parts, got {len(pool.parts)}"
    shape: torch.Size | None = None
    for i, part in enumerate(pool.parts):
        if part.lengths is not None:
            return f"part {i} has lengths"
        sides = ((part.keys, part.key_format), (part.values, part.value_format))
        for held, fmt in sides:
            if reason := _why_not_held(held, fmt, pool.source, native):
                return f"part {i}: {reason}"
            x = held.codes if isinstance(held, Packed) else held
            wide = x.shape[-1] * 8 // (8 if fmt is None else fmt.bits)
            now = torch.Size((*x.shape[:2], wide))
            if shape is not None and now != shape:
                return f"keys and values of all parts must be alike, got {shape} and {now}"
            shape = now
            if x.shape[2] == 0:
                return f"part {i} is empty"
        if i == pool.own and (part.key_format, part.value_format) != pool.formats:
            return f"part {i} is not in the format of the result"
    assert shape is not None
    if sum(map(slots_of, pool.parts)) * shape[2] > MOST_PLACES:
        return f"slots x channels of all parts must be at most {MOST_PLACES}"
    for fmt in pool.formats:
        if fmt is not None and (reason := why_not_format(fmt, shape[2])):
            return reason
    first = pool.parts[0].keys
    x = first.codes if isinstance(first, Packed) else first
    if pool.source.dtype is not torch.int64:
        return f"source must be int64, got {pool.source.dtype}"
    return why_not_slots(x, pool.source)


def _why_not_held(
    held: Held, fmt: Format | None, source: Tensor, native: torch.dtype
) -> str | None:
    """Reason why what is held cannot be read, or None."""
    if isinstance(held, Packed) != (fmt is not None):
        return f"it must be packed exactly when it has a format, got format {fmt}"
    if isinstance(held, Packed):
        assert fmt is not None
        return why_not_here(source, held.codes, held.scales) or why_not_packed(held, fmt)
    if held.dtype is not native:
        return f"its type must be that of results, {native}, got {held.dtype}"
    if held.dim() != 4 or held.shape[-1] not in HEAD_DIMS:
        return f"head_dim must be 64, 128 or 256, got {held.shape[-1]}"
    return why_not_here(source, held)
