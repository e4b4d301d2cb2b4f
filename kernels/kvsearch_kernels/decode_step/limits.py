"""What the Triton implementation of `decode_step` cannot take, in one sentence."""

from math import gcd

import torch
from torch import Tensor

from kvsearch_kernels.addresses import rows_at
from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums, why_not_alike
from kvsearch_kernels.decode_step.table import key_kinds_of, kinds_of, sides_of
from kvsearch_kernels.decode_step.turned import Turned
from kvsearch_kernels.launch import why_not_here
from kvsearch_kernels.packed_attention.limits import why_not_parts, why_not_turned
from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.repack_kv.limits import MOST_KINDS as MOST_REPACKED

# Head size -> pairs of formats in a layer, at most: each is code of its own in one kernel, and with
# 256 channels more of them spill.
MOST_KINDS = {64: 8, 128: 8, 256: 4}


def why_not(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(q, k, v):
        return reason
    asked = (q.shape, q.dtype, q.device, k.shape, v.shape, scale, softcap)
    if stores.known.get("taken by triton") == asked:
        return None
    if k.shape != v.shape or k.dim() != 4 or k.shape[2] != 1:
        return f"k and v must be one token [B, H, 1, D], got {tuple(k.shape)}, {tuple(v.shape)}"
    if q.dim() != 3 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"q must be [B, Hq, D], of {k.shape[1]} KV heads, got {tuple(q.shape)}"
    first, group = 0, q.shape[1] // k.shape[1]
    for heads in stores.heads:
        if reason := _why_not_pool(heads, k):
            return reason
        if heads.entering is not None:
            return "there is no kernel by which tokens enter a tier at once"
        count = heads.parts[-1].keys.shape[1]  # type: ignore[union-attr]
        mine = q[:, first * group : (first + count) * group]
        if reason := why_not_parts(mine, heads.parts, scale, softcap):
            return reason
        if reason := next(filter(None, map(_why_not_rows, heads.parts)), None):
            return reason
        if heads.sums is not None and (reason := _why_not_sums(heads.sums, heads)):
            return reason
        if heads.turned is not None and (reason := _why_not_turned(heads.turned, heads)):
            return reason
        first += count
    if first != k.shape[1]:
        return f"stores of {first} KV heads do not take {k.shape[1]}"
    if reason := _why_not_together(stores):
        return reason
    stores.known["taken by triton"] = asked
    return None


def _why_not_pool(heads: Heads, k: Tensor) -> str | None:
    """Reason why a token cannot be stored in these heads."""
    pool = heads.parts[-1]
    if not isinstance(pool.keys, Tensor) or not isinstance(pool.values, Tensor):
        return "the last part must be in 16 bits"
    if pool.keys.shape[2] == 0 or pool.lengths is None:
        return "the last part must have slots, and lengths"
    if pool.keys.shape[-1] != k.shape[-1] or pool.values.shape[-1] != k.shape[-1]:
        return f"pools must have {k.shape[-1]} channels, got {pool.keys.shape[-1]}"
    return None


def _why_not_rows(part: Part) -> str | None:
    """Reason why the rows of a part cannot be found by the address of each head's first."""
    for x in sides_of(part):
        wide = x.shape[-1]
        if x.stride(-1) != 1 or (x.shape[2] > 1 and x.stride(2) != wide):
            return f"slots of a head must follow one another, got strides {x.stride()}"
        if x.numel() and (rows_at(x) % gcd(16, wide * x.element_size())).any():
            return f"rows of {wide} x {x.element_size()} bytes must start at a multiple of that"
    used = part.lengths
    if used is not None and (used.dtype is not torch.int32 or not used.is_contiguous()):
        return f"lengths must be contiguous int32, got {used.dtype}"
    return None


def _why_not_sums(sums: Sums, heads: Heads) -> str | None:
    """Reason why what slots receive cannot be added up."""
    B, H = heads.parts[-1].keys.shape[:2]  # type: ignore[union-attr]
    N, order = sum(map(slots_of, heads.parts)), sums.order
    if reason := why_not_here(sums.sums, *([] if order is None else [order])):
        return reason
    if sums.sums.dtype is not torch.float32 or sums.sums.shape not in ((B, H, N), (B, 1, N)):
        return f"sums must be [{B}, {H} or 1, {N}] float32, got {tuple(sums.sums.shape)}"
    if N > 1 and sums.sums.stride(-1) != 1:
        return "the last axis of sums must be contiguous"
    if order is None:
        return None
    return _why_not_slots("order", order, B, sums.sums.shape[1], N)


def _why_not_slots(what: str, slots: Tensor, B: int, V: int, N: int) -> str | None:
    """Reason why `slots` are not those of N slots of V heads or voters, or not where they could."""
    of = slots.shape[:-1] in ((), (1, 1), (B, 1), (1, V), (B, V))
    if slots.dtype is not torch.int64 or slots.shape[-1] != N or not of:
        got = f"{tuple(slots.shape)} {slots.dtype}"
        return f"{what} must be [{N}] or [B, {V}, {N}] int64, got {got}"
    if N > 1 and slots.stride(-1) != 1:
        return f"the last axis of {what} must be contiguous"
    return None


def _why_not_turned(how: Turned, heads: Heads) -> str | None:
    """Reason why keys cannot be turned to the index of their slots."""
    (B, H, _, D), N = heads.parts[-1].keys.shape, sum(map(slots_of, heads.parts))  # type: ignore[union-attr]
    freq, index = how.inv_freq, how.index
    if any(p.key_format is not None and p.key_format.along == "tokens" for p in heads.parts):
        return "keys that are turned cannot be grouped along tokens"
    if reason := why_not_here(freq, *([] if index is None else [index])):
        return reason
    if freq.dtype is not torch.float32 or freq.shape[:-1] not in ((), (H,)):
        return f"angles must be [R / 2] or [{H}, R / 2] float32, got {tuple(freq.shape)}"
    if not 1 <= freq.shape[-1] <= D // 2 or freq.stride(-1) != 1:
        return f"there must be 1 to {D // 2} contiguous angles, got {tuple(freq.shape)}"
    return None if index is None else _why_not_slots("index", index, B, H, N)


def _why_not_together(stores: Stores) -> str | None:
    """Reason why the stores of a layer cannot be served by one launch."""
    pools = [h.parts[-1].keys for h in stores.heads]
    types = {x.dtype for h in stores.heads for p in h.parts for x in (p.keys, p.values)
             if isinstance(x, Tensor)}  # fmt: skip
    if len(types) > 1:
        return f"16-bit parts must be of one type, got {sorted(map(str, types))}"
    if len({x.device for x in pools}) > 1:  # type: ignore[union-attr]
        return "stores are on different devices"
    D = pools[0].shape[-1]  # type: ignore[union-attr]
    if reason := why_not_alike(stores):
        return reason
    if (keys := len(key_kinds_of(stores))) > MOST_REPACKED:
        return f"there must be at most {MOST_REPACKED} formats of keys, got {keys}"
    if reason := why_not_turned([p for h in stores.heads for p in h.parts], D):
        return reason
    most = MOST_KINDS[D]
    if (kinds := len(kinds_of(stores))) > most:
        return f"there must be at most {most} pairs of formats in a layer, got {kinds}"
    rules = {(s.alpha, s.keep) for h in stores.heads if (s := h.sums) is not None}
    return f"sums must be weighted alike, got {sorted(rules)}" if len(rules) > 1 else None
