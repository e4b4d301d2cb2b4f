"""Triton implementation of `evict_in_place`; importing it imports no Triton."""

import torch
from torch import Tensor

from kvsearch_kernels.configs import EVICT_COPIED, evict_tile
from kvsearch_kernels.evict_in_place.reference import Evictions
from kvsearch_kernels.launch import DTYPES, FUSED, HEAD_DIMS, ampere, emulated, on, why_not_here

__all__ = ["emulated", "forward", "why_not"]

# Slots, half as many in fp32; tokens of an interval; and channels in fp32: more would spill.
MOST, MOST_NEW, MOST_WIDE = 4096, 128, 128


def why_not(
    slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor, kept: Tensor,
    weights: Tensor, how: Evictions,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    vectors, others = (slots, queries, new, kept), [sums, born, weights]
    if how.divisors is not None:
        others.append(how.divisors)
    if reason := why_not_here(*vectors, *others):
        return reason
    if queries.dtype not in DTYPES or any(x.dtype is not queries.dtype for x in vectors):
        return f"vectors must share float16, bfloat16 or float32, got {[x.dtype for x in vectors]}"
    if how.smooth is not None or how.older is not None:
        return "ranks must be of one interval's sums, and not smoothed"
    _, B, H, S, D = slots.shape
    wide = queries.dtype is torch.float32
    if D not in HEAD_DIMS or (wide and D > MOST_WIDE):
        return f"head_dim must be 64, 128 or 256, in float32 at most {MOST_WIDE}, got {D}"
    most = MOST // 2 if wide else MOST
    if most < S or new.shape[-2] > MOST_NEW:
        return f"at most {most} slots and {MOST_NEW} new tokens, got {S} and {new.shape[-2]}"
    for what, x, kind in (("sums", sums, torch.float32), ("born", born, torch.int64)):
        if x.dtype is not kind or x.shape != (B, H, S):
            return f"{what} must be [{B}, {H}, {S}] {kind}, got {list(x.shape)} {x.dtype}"
    if any(x.dtype is not torch.float32 for x in others if x is not born):
        return "sums, weights and divisors must be float32"
    if not all(x.is_contiguous() for x in (*vectors, *others)):
        return "all tensors must be contiguous"
    return None


def forward(
    slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor, kept: Tensor,
    weights: Tensor, how: Evictions,
) -> Tensor:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.evict_in_place.triton_kernels import evict

    _, B, H, S, D = slots.shape
    J, _, rows, _ = queries.shape
    c, out = new.shape[-2], torch.empty_like(queries)
    if out.numel() == 0:
        return out
    tile = evict_tile(D, queries.element_size(), rows, S, ampere=ampere(slots.device))
    CP = 1 << (c - 1).bit_length()
    products = torch.empty(B * H, tile.rows, S, dtype=torch.float32, device=slots.device)
    listed = torch.empty(B * H, 2, CP, dtype=torch.int32, device=slots.device)
    with on(slots.device):
        evict[(B * H,)](
            slots, sums, born, queries, new, kept, weights,
            weights if how.divisors is None else how.divisors, products, listed, out,
            J, S, c, rows, how.first, how.last, how.recent, how.seen, how.carry,
            how.softcap or 1.0,
            D=D, BN=tile.columns, BM=tile.rows, SP=max(128, 1 << (S - 1).bit_length()), CP=CP,
            ROWS=EVICT_COPIED, HAS_CAP=how.softcap is not None, AGED=how.divisors is not None,
            FORGETS=how.forgets, **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
