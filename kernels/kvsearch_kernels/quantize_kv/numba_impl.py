"""Implementation of `quantize_kv` for a CPU, bit for bit the reference; imports no numba itself.

Even levels of 2 to 8 bits are found in one loop. Other codebooks add numbers up, and torch's order
of doing so is part of the result: their own `encode` runs between a loop that picks and rotates and
a loop that packs.
"""

import torch
from torch import Tensor

from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.gather_kv.numba_impl import out_of_range
from kvsearch_kernels.launch import check_slots, why_not_slots
from kvsearch_kernels.numba_args import KINDS, row_of, slots_at, why_not_memory
from kvsearch_kernels.quantize_kv.reference import Format, Packed, rotation_block

__all__ = ["forward", "why_not"]


def why_not(x: Tensor, fmt: Format, *, slots: Tensor | None = None) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_memory(x, *([] if slots is None else [slots])):
        return reason
    if x.dim() != 4:
        return f"x must have 4 axes, got shape {tuple(x.shape)}"
    if x.dtype not in KINDS:
        return f"there is no loop for {x.dtype}"
    if fmt.along != "channels":
        return "there is no loop for groups along tokens"
    return why_not_slots(x, slots)


def forward(x: Tensor, fmt: Format, *, slots: Tensor | None = None) -> Packed:
    """As `reference.quantize_slots`."""
    from kvsearch_kernels.numba_loops import packing as loops

    B, H, N, D = x.shape
    if slots is not None:
        check_slots(slots, N)
    n = N if slots is None else slots.shape[-1]
    values = torch.empty(B, H, n, D, dtype=torch.float32, device="cpu")
    at, _held = slots_at(slots, B, H)  # `at` points to what it holds
    block = rotation_block(D, fmt.block) if fmt.rotate else 0
    if not loops.vectors(row_of(x, None), N, at, block, values.numpy()):
        assert slots is not None
        raise out_of_range(slots, N)
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
