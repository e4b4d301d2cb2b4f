"""Meaning of `time_order`."""

from torch import Tensor


def reference(pools: Tensor) -> Tensor:
    """Index of each slot in the order of pools, which is that of time within a pool.

    Args:
        pools: pool of each slot in order of time, `[..., N]` uint8.

    Returns:
        Same shape, int64: picking by it puts data in the order of pools into order of time.
    """
    return pools.argsort(dim=-1, stable=True).argsort(-1)
