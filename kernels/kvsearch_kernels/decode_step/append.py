"""Writing new tokens behind those that pools of fixed capacity hold: the first part of a step."""

import torch
from torch import Tensor

from kvsearch_kernels.launch import checking


def append(
    keys: Tensor, values: Tensor, lengths: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write tokens behind the slots in use, in place; what does not fit is not written.

    Where they go is read on the device, so that no argument of a launch changes from step to step.

    Args:
        keys: pool `[B, H, C, D]`.
        values: pool `[B, H, C, Dv]`.
        lengths: slots in use of each batch row and head `[B, H]` int32, the first ones; afterwards
            larger by M.
        k: new keys `[B, H, M, D]`, rounded to the type of `keys`.
        v: new values `[B, H, M, Dv]`, likewise.

    Returns:
        The first three arguments.
    """
    check_room(keys, lengths, k)
    C, M = keys.shape[2], k.shape[2]
    used = lengths.long().unsqueeze(-1)
    # a token that does not fit repeats the last one that does, or what the last slot holds
    token = torch.minimum(torch.arange(M, device=k.device), (C - 1 - used).clamp_min(0))
    at, fits = (used + token).clamp_max(C - 1).unsqueeze(-1), (used < C).unsqueeze(-1)
    for pool, new in ((keys, k), (values, v)):
        rows = at.expand(new.shape)
        found = new.to(pool.dtype).gather(2, token.unsqueeze(-1).expand(new.shape))
        pool.scatter_(2, rows, torch.where(fits, found, pool.gather(2, rows)))
    return keys, values, lengths.add_(M)


def check_room(keys: Tensor, lengths: Tensor, k: Tensor) -> None:
    """Under `KVSEARCH_CHECK=1`, raise IndexError when tokens do not fit behind those held."""
    if checking() and bool((lengths + k.shape[2] > keys.shape[2]).any()):
        raise IndexError(
            f"{k.shape[2]} tokens do not fit pools of {keys.shape[2]} slots, of which "
            f"{lengths.tolist()} are in use"
        )
