"""A table of addresses on the device, which lies where the layer's table before it lay."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows
from kvsearch_kernels.sending import send


def placed(kept: dict[str, Any], sections: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """Sections on the device: where those of the layer lay before, if they are as long.

    Nothing waits. What did not change is not copied, so that a cache which is full, and repeats
    its addresses at every compaction, can go on with the same captured launches. Each section
    begins at a multiple of 16 bytes: what Triton compiles for an address depends on that.
    """
    starts = list(accumulate((x.size + x.size % 2 for x in sections), initial=0))
    rows = np.zeros(starts.pop(), np.int64)
    for start, x in zip(starts, sections, strict=True):
        rows[start : start + x.size] = x.ravel()
    before, at = kept.get("table", (None, None))
    if before is None or before.shape != rows.shape or at.device != device:
        at = torch.empty(rows.shape, dtype=torch.int64, device=device)
    if before is None or not np.array_equal(before, rows):
        kept["table"] = rows, send(rows, at)
    return [at[i : i + x.size].view(x.shape) for i, x in zip(starts, sections, strict=True)]
