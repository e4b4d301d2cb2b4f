"""Numbers that the device finds and the host needs, but not at once: so it does not wait for them.

They are copied while the device goes on. When the host asks for them a token later they are there,
unless the host is by then a whole token ahead of the device.
"""

from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """Something that the device will have reached."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Later:
    """Numbers `[N]` on their way to the host."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)  # which pins its memory
        self._copied = recorded(numbers.device)

    def tolist(self) -> list[int]:
        """The numbers; waits if they are not there yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()


def recorded(device: torch.device) -> Event | None:
    """What the device has reached when all that it was given is done; None if it is done now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
