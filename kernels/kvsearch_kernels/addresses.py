"""Where tensors lie, as 64-bit integers on the device: what one launch over many tensors is given.

A kernel has no list of pointers as an argument. Its programs read the addresses that they need from
a table, a row each, and so does every number that changes from call to call: nothing recompiles.
"""

from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]


def rows_at(x: Tensor) -> Rows:
    """Addresses `[B, H]`, in bytes, of the rows of each head of `x` `[B, H, ...]`."""
    b, h = (np.arange(x.shape[i], dtype=np.int64) * x.stride(i) for i in range(2))
    return x.data_ptr() + (b[:, None] + h) * x.element_size()


def readable(x: Tensor) -> Tensor:
    """`x`, copied unless the slots of a head follow one another and begin where loads may."""
    wide = x.shape[-1]
    follow = x.stride(-1) == 1 and (x.shape[2] == 1 or x.stride(2) == wide)
    if follow and not (rows_at(x) % gcd(16, wide * x.element_size())).any():
        return x
    return x.clone(memory_format=torch.contiguous_format)
