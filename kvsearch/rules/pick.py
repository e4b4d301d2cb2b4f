"""Picking slots of per-slot data; what scorers and stores do alike."""

import torch
from torch import Tensor


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Take slots of per-slot data `[..., T]`, whose leading axes may broadcast with `index`."""
    if x.dim() == 1:
        return x[index]
    if index.dim() == 1:
        return x.index_select(-1, index)
    if x.shape[:-1] == index.shape[:-1]:
        return x.gather(-1, index)  # without what makes axes alike
    return torch.take_along_dim(x, index, -1)
