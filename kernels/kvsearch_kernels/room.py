"""Memory that a caller keeps for what an op writes, so that a step takes none and moves nothing.

A CUDA graph replays launches with the addresses that they had when they were captured. With a room,
results and what is between two kernels lie where they lay in the call before.
"""

import torch
from torch import Tensor


class Room:
    """Tensors by name, shape and type: the same ones at every call.

    What an op returns from a room is overwritten by the next call that asks for the same. One room
    serves all layers on a device that run one after the other, on one stream.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], Tensor] = {}

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory with any content."""
        key = name, shape, dtype, device
        if key not in self._held:
            self._held[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._held[key]

    @property
    def nbytes(self) -> int:
        """Bytes of everything taken so far."""
        return sum(x.nbytes for x in self._held.values())


def taken(
    room: Room | None, name: str, *shape: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Memory of a room, or without one fresh memory."""
    if room is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return room.take(name, shape, dtype, device)


def kept(room: Room | None, name: str, x: Tensor) -> Tensor:
    """`x` where a room keeps what has this name; without a room `x` itself."""
    return x if room is None else room.take(name, tuple(x.shape), x.dtype, x.device).copy_(x)
