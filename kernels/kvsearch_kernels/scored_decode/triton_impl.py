"""`scored_decode`: the launch of `decode_attention` also writes its products, then one reads them.

A second pass over the keys would read more than the products are (4 bytes a slot and query head)
and unpack every key twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch_kernels.configs import RECEIVE_COLUMNS, RECEIVE_WARPS
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.decode_attention.triton_impl import launch, why_not
from kvsearch_kernels.launch import FUSED, ceil_div, emulated, on
from kvsearch_kernels.quantize_kv.reference import Packed
from kvsearch_kernels.room import Room, taken

__all__ = ["emulated", "forward", "why_not"]


def forward(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.scored_decode.triton_kernels import receive

    out, lse, products = launch(q, parts, scale, softcap, room, scores=True)
    assert products is not None
    B, Hq, width = products.shape
    first = parts[0].keys.codes if isinstance(parts[0].keys, Packed) else parts[0].keys
    H = first.shape[1]
    received = taken(room, "received", B, H, width, dtype=torch.float32, device=q.device)
    if received.numel():
        with on(q.device):
            receive[(ceil_div(width, RECEIVE_COLUMNS), B * H)](
                products, lse, received, width, Hq // H,
                BN=RECEIVE_COLUMNS, **FUSED, num_warps=RECEIVE_WARPS,
            )  # fmt: skip
    return out, received
