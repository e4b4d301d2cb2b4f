"""Triton implementation of `repack_kv`: one launch for keys and values of all pools of a layer.

Importing it imports no Triton.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.configs import REPACK_ROWS, repack_warps
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.launch import FUSED, ceil_div, check_slots, emulated, on
from kvsearch_kernels.packed_attention.reference import slots_of
from kvsearch_kernels.packed_attention.triton_args import levels_on
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.repack_kv.limits import why_not
from kvsearch_kernels.repack_kv.reference import Held, NewPool
from kvsearch_kernels.repack_kv.table import constants, heads_of, kinds_of, rows_of

__all__ = ["emulated", "forward", "why_not"]


def forward(
    pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> list[tuple[Held, Held]]:
    """As `reference`."""
    from kvsearch_kernels.repack_kv.triton_kernels import repack

    if not pools:
        return []
    device = pools[0].source.device
    kinds, D = kinds_of(pools), heads_of(pools[0])[2]
    kept: list[Tensor] = []  # copies whose addresses are in the table, until the launch
    made, rows = [], []
    for pool in pools:
        check_slots(pool.source, sum(map(slots_of, pool.parts)))
        shape = *heads_of(pool)[:2], pool.source.shape[-1]
        keys, values = (_empty(fmt, shape, D, native, device) for fmt in pool.formats)
        made.append((keys, values))
        if shape[-1]:
            rows.append(rows_of(pool, made[-1], kinds, D, kept))
    most = max(pool.source.shape[-1] for pool in pools)
    if not sum(map(len, rows)):
        return made
    table = np.concatenate(rows)
    with on(device):
        repack[(ceil_div(most, REPACK_ROWS), len(table))](
            sent(table, device), levels_on(device), torch.empty(0, dtype=dtype, device=device),
            torch.empty(0, dtype=native, device=device), D=D,
            FORMATS=tuple(constants(fmt, D) for fmt in kinds), BT=REPACK_ROWS,
            **FUSED, num_warps=repack_warps(D, len(kinds)),
        )  # fmt: skip
    return made


def _empty(
    fmt: Format | None, shape: tuple[int, int, int], D: int, native: torch.dtype,
    device: torch.device,
) -> Held:  # fmt: skip
    """Memory for keys or values of the result."""
    if fmt is None:
        return torch.empty(*shape, D, dtype=native, device=device)
    codes = torch.empty(*shape, D * fmt.bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(*shape, D // fmt.group, fmt.numbers, dtype=torch.float16, device=device)
    return Packed(codes, scales)
