"""Triton implementation of `settle_kv`: one launch for keys and values of all tiers.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.configs import SETTLE_ROWS, SETTLE_WARPS
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    check_slots,
    emulated,
    on,
    per_head,
    rows_last,
    why_not_heads,
    why_not_here,
    why_not_slots,
)
from kvsearch_kernels.quantize_kv.reference import Format
from kvsearch_kernels.quantize_kv.triton_impl import steps_of, tables, why_not_format
from kvsearch_kernels.settle_kv.reference import Pair

__all__ = ["emulated", "forward", "why_not"]

MOST_TIERS = 3


def why_not(
    k: Tensor,
    v: Tensor,
    before: Tensor,
    after: Tensor,
    tiers: Sequence[Pair],
    *,
    keep: Tensor | None = None,
    room: int = 0,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(k, v, before, after, *([] if keep is None else [keep])):
        return reason
    if reason := why_not_heads(k, v):
        return reason
    if k.shape != v.shape:
        return f"keys and values must be alike, got {tuple(k.shape)} and {tuple(v.shape)}"
    if len(tiers) > MOST_TIERS:
        return f"there must be at most {MOST_TIERS} tiers, got {len(tiers)}"
    for fmt in (fmt for pair in tiers for fmt in pair if fmt is not None):
        if reason := why_not_format(fmt, k.shape[-1]):
            return reason
    if before.dtype is not torch.uint8 or after.dtype is not torch.uint8:
        return f"pools must be uint8, got {before.dtype} and {after.dtype}"
    for what in (before, after, *([] if keep is None else [keep])):
        if not per_head(k, what):
            return f"pools and slots must be [N] or one list a head, got {tuple(what.shape)}"
    return None if keep is None else why_not_slots(k, keep)


def constants(side: str, i: int, fmt: Format | None, D: int) -> dict[str, int | bool]:
    """Compile-time arguments of keys (`K`) or values (`V`) of a tier."""
    if fmt is None:
        return {f"{side}B{i}": 16, f"{side}G{i}": D, f"{side}L{i}": False, f"{side}R{i}": 0}
    return {
        f"{side}B{i}": fmt.bits, f"{side}G{i}": fmt.group, f"{side}L{i}": fmt.levels == "lloyd",
        f"{side}R{i}": steps_of(fmt, D),
    }  # fmt: skip


def forward(
    k: Tensor,
    v: Tensor,
    before: Tensor,
    after: Tensor,
    tiers: Sequence[Pair],
    *,
    keep: Tensor | None = None,
    room: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    from kvsearch_kernels.settle_kv.triton_kernels import settle

    (B, H, N, D), n = k.shape, after.shape[-1]
    out = [torch.empty(B, H, max(n, room), D, dtype=x.dtype, device=x.device) for x in (k, v)]
    if n == 0:
        return out[0], out[1]
    k, v = rows_last(k), rows_last(v)
    if keep is not None:
        check_slots(keep, N)
    picks = after if keep is None else keep  # never read without GATHER
    before, after, picks = (x.expand(B, H, x.shape[-1]) for x in (before, after, picks))
    fixed: dict[str, int | bool] = {}
    known: list[Tensor] = []
    for i in range(MOST_TIERS):  # the kernel takes as many; those that are not there keep all
        pair = tiers[i] if i < len(tiers) else (None, None)
        for side, fmt in zip("KV", pair, strict=True):
            fixed |= constants(side, i, fmt, D)
            known += tables(1 if fmt is None else fmt.bits, k.device)
    with on(k.device):
        settle[(ceil_div(n, SETTLE_ROWS), B * H, 2)](
            k, v, *out, before, after, picks, *known, *k.stride()[:3], *v.stride()[:3],
            *before.stride(), *after.stride(), *picks.stride(), n, max(n, room), H,
            D=D, TIERS=len(tiers), GATHER=keep is not None, BT=SETTLE_ROWS, **fixed,
            **FUSED, num_warps=SETTLE_WARPS,
        )  # fmt: skip
    return out[0], out[1]
