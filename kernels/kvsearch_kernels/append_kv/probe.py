"""Probe of `append_kv`. The op writes to its arguments: what was there before is always alike."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.append_kv.reference import reference
from kvsearch_kernels.probing import Case, Draw

#         B  H  C   D    Dv   M
SHAPES = ((2, 3, 9, 64, 64, 1), (1, 2, 40, 128, 96, 5), (1, 1, 4, 1, 3, 6))


def _before(
    B: int, H: int, C: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools full of 7, and lengths that differ by head; the longest leaves less than a token."""
    keys, values = (torch.full((B, H, C, w), 7.0, dtype=dtype, device=device) for w in widths)
    lengths = C - torch.arange(B * H, device=device).view(B, H) * 2 % C
    return keys, values, lengths.int()


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """One token and several, pools that are full, keys and values of other widths and types."""
    draw = Draw(device, dtype)
    for B, H, C, D, wide, M in SHAPES:
        for kind in (dtype, torch.float32):
            k = draw.normal(B, M, H, D, dtype=kind).transpose(1, 2)
            v = draw.normal(B, H, M, wide, dtype=kind)
            yield (*_before(B, H, C, (D, wide), dtype, device), k, v), {}


def differs(
    got: tuple[Tensor, Tensor, Tensor], keys: Tensor, values: Tensor, lengths: Tensor,
    k: Tensor, v: Tensor,
) -> str | None:  # fmt: skip
    """Why what was written is wrong, or None."""
    B, H, C = keys.shape[:3]
    widths = keys.shape[3], values.shape[3]
    want = reference(*_before(B, H, C, widths, keys.dtype, torch.device("cpu")), k, v)
    for what, x, y in zip(("keys", "values", "lengths"), got, want, strict=True):
        if x.dtype is not y.dtype or not torch.equal(x, y):
            return f"{what} {tuple(x.shape)} are wrong after {k.shape[2]} tokens"
    return None
