"""Numbers of the host on their way to a device, for which the host does not wait."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(numbers: NDArray[Any], to: Tensor) -> Tensor:
    """Write `numbers` to a tensor of the same shape on a device; returns it."""
    host = torch.from_numpy(numbers)
    # from memory that may be swapped out, CUDA copies only after a wait
    return to.copy_(host.pin_memory() if to.device.type == "cuda" else host, non_blocking=True)


def sent(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """`numbers` on a device; on a CPU they share their memory."""
    host = torch.from_numpy(numbers)
    if device.type == "cpu":
        return host
    return send(numbers, torch.empty(host.shape, dtype=host.dtype, device=device))
