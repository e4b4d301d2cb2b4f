"""Implementation of `quantize_kv` for a CPU, bit for bit the reference; imports no numba itself.

Even levels of 2 to 8 bits are found in one loop. Other codebooks add numbers up, and torch's order
of doing so is part of the result: their own `encode` runs between a loop that rotates and
a loop that packs.
"""

import torch
from torch import Tensor

from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.numba_args import KINDS, row_of, why_not_memory
from kvsearch_kernels.quantize_kv.reference import Format, Packed, rotation_block

__all__ = ["forward", "why_not"]


def why_not(x: Tensor, fmt: Format) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_memory(x):
        return reason
    if x.dim() != 4:
        return f"x must have 4 axes, got shape {tuple(x.shape)}"
    if x.dtype not in KINDS:
        return f"there is no loop for {x.dtype}"
    if fmt.along != "channels":
        return "there is no loop for groups along tokens"
    return None


def forward(x: Tensor, fmt: Format) -> Packed:
    """As `reference.quantize`."""
    from kvsearch_kernels.numba_loops import packing as loops

    B, H, n, D = x.shape
    values = torch.empty(B, H, n, D, dtype=torch.float32, device="cpu")
    block = rotation_block(D, fmt.block) if fmt.rotate else 0
    loops.vectors(row_of(x, None), block, values.numpy())
    packed = torch.empty(B, H, n, D * fmt.bits // 8, dtype=torch.uint8, device="cpu")
    if fmt.levels == "uniform" and fmt.bits > 1:
        codes = torch.empty(B * H * n, D, dtype=torch.uint8, device="cpu")
        scales = torch.empty(B, H, n, D // fmt.group, 2, dtype=torch.float16, device="cpu")
        numbers = scales.view(torch.uint16).view(B * H * n, D // fmt.group, 2)
        loops.quantize_uniform(
            values.view(-1, D).numpy(), fmt.bits, fmt.group, codes.numpy(), numbers.numpy()
        )
    else:
        groups = values.unflatten(-1, (D // fmt.group, fmt.group))
        found, scales = CODEBOOKS[fmt.levels].encode(groups, fmt.bits)
        codes = found.to(torch.uint8).view(-1, D)
    loops.pack(codes.numpy(), fmt.bits, packed.view(-1, packed.shape[-1]).numpy())
    return Packed(packed, scales)
