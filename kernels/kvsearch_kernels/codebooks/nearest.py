"""Which Lloyd-Max level is nearest, on a CPU: a coarse grid instead of a binary search."""

from functools import cache

import torch
from torch import Tensor

from kvsearch_kernels.codebooks.gaussian import lloyd_levels


def nearest_codes(z: Tensor, bits: int) -> Tensor:
    """The code of the level nearest to each value, as `torch.bucketize` finds it; int32.

    A coarse grid has the nearest edge of each of its cells, and cells are narrower than half the
    distance of two edges; so one comparison is enough.
    """
    edges, nearest, width = _grid(bits)
    # NaN is above every edge, as in a binary search
    cell = ((z - edges[0]) / width).nan_to_num_(float(len(nearest)))
    at = cell.clamp_(0, len(nearest) - 1).int().reshape(-1)
    edge = nearest.index_select(0, at)
    above = torch.le(z.reshape(-1), edges.index_select(0, edge)).logical_not_()
    return edge.add_(above).view(z.shape)


@cache
def _grid(bits: int) -> tuple[Tensor, Tensor, float]:
    """Edges between levels, the edge nearest to each cell, and the width of a cell."""
    levels = lloyd_levels(bits)
    edges = (levels[1:] + levels[:-1]) / 2
    gap = 1.0 if len(edges) == 1 else float((edges[1:] - edges[:-1]).min())
    width = gap / 4
    cells = int((edges[-1] - edges[0]) / width) + 1
    centres = edges[0] + (torch.arange(cells, dtype=edges.dtype, device="cpu") + 0.5) * width
    nearest = (centres.unsqueeze(-1) - edges).abs().argmin(-1)
    return edges, nearest.int(), width
