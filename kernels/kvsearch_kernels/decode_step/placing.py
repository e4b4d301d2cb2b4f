"""A table of addresses on the device, which lies where the layer's table before it lay."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows
from kvsearch_kernels.sending import send


def placed(kept: dict[str, Any], sections: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """Sections on the device: where those of the layer lay before, if they are as long.

    Nothing waits. What did not change is not copied, so that a cache which is full, and repeats
    its addresses at every compaction, can go on with the same captured launches.
    """
    rows = np.concatenate([x.ravel() for x in sections])
    before, at = kept.get("table", (None, None))
    if before is None or before.shape != rows.shape or at.device != device:
        at = torch.empty(rows.shape, dtype=torch.int64, device=device)
    if before is None or not np.array_equal(before, rows):
        kept["table"] = rows, send(rows, at)
    whole = at.split([x.size for x in sections])
    return [x.view(y.shape) for x, y in zip(whole, sections, strict=True)]
