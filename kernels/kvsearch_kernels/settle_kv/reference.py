"""Meaning of `settle_kv`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.launch import check_slots
from kvsearch_kernels.quantize_kv.fake import fake_quantize
from kvsearch_kernels.quantize_kv.reference import Format

Pair = tuple[Format | None, Format | None]


def reference(
    k: Tensor,
    v: Tensor,
    before: Tensor,
    after: Tensor,
    tiers: Sequence[Pair],
    *,
    keep: Tensor | None = None,
    room: int = 0,
) -> tuple[Tensor, Tensor]:
    """Drop slots, and round those that enter a tier to what the tier reads back.

    Args:
        k, v: `[B, H, N, D]`.
        before: pool of each slot, `[N]` or `[B or 1, H or 1, N]` uint8.
        after: pool of each slot that stays, `[n]` or per head likewise. Pools beyond the tiers hold
            16 bits.
        tiers: format of keys and of values of each tier; None keeps what is there.
        keep: slots that stay, `[n]` or per head likewise; None keeps all.
        room: slots to have memory for.

    Returns:
        Keys and values `[B, H, max(n, room), D]`; what is behind the first `n` means nothing.
    """
    shape = k.shape[:2]
    if keep is not None:
        check_slots(keep, k.shape[2])
        index = keep.long().expand(*shape, keep.shape[-1])
        before = before.expand(*shape, before.shape[-1]).gather(-1, index)
        k, v = (x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1])) for x in (k, v))
    changed = before != after
    masks = [(changed & (after == i)).unsqueeze(-1) for i in range(len(tiers))]
    made = []
    for side, x in enumerate((k, v)):
        for mask, formats in zip(masks, tiers, strict=True):
            if (fmt := formats[side]) is not None:
                x = torch.where(mask, fake_quantize(x, fmt).to(x.dtype), x)
        n = x.shape[2]
        out = x.new_empty(*shape, max(n, room), x.shape[-1])
        out[:, :, :n] = x
        made.append(out)
    return made[0], made[1]
