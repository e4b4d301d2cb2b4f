"""Picking rows of tensors that have one for each slot."""

import torch
from torch import Tensor


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Take slots `index` (`[N]`, or per head `[B, V, N]`) of `x` `[B, H, T, D]`."""
    if index.dim() == 1:
        return x.index_select(2, index)
    B, H, T, D = x.shape
    index = index.expand(B, H, -1)
    if x.device.type != "cpu" or not x.is_contiguous():
        return x.gather(2, index.unsqueeze(-1).expand(*index.shape, D))
    first = torch.arange(0, B * H * T, T, device=x.device).view(B, H, 1)
    rows = x.view(-1, D).index_select(0, (index + first).view(-1))  # copies rows, not numbers
    return rows.view(*index.shape, D)


_slots: dict[torch.device, Tensor] = {}


def first_slots(n: int, device: torch.device) -> Tensor:
    """The indices of `n` slots, in a row; what is kept of them on a device is twice as long."""
    if device not in _slots or _slots[device].shape[0] < n:
        _slots[device] = torch.arange(max(2 * n, 1024), device=device)
    return _slots[device][:n]


def first_of(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` true entries of `mask` `[..., N]` are; what is false comes after."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
