"""Probe of `time_order`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.time_order.reference import reference


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Some pools, one pool, every number, none; one list and one for each head."""
    draw = Draw(device, dtype)
    for pools, shape in ((3, (2, 3, 70)), (1, (1, 33)), (256, (600,)), (2, (1, 2, 1)), (2, (0,))):
        yield (draw.whole(0, pools, *shape, dtype=torch.uint8),), {}


def differs(got: Tensor, pools: Tensor) -> str | None:
    """Why the order is wrong, or None."""
    want = reference(pools)
    same = got.dtype is want.dtype and torch.equal(got, want)
    return None if same else f"slots of pools {tuple(pools.shape)} are in another order"
