"""Probe of `gather_kv`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.gather_kv.reference import reference
from kvsearch_kernels.probing import Case, Draw

WIDTHS = (1, 2, 48, 64, 128)  # scales, codes and vectors
#         D   R   tokens; pairs that turn are all, or not a power of two and not all
TURNS = ((64, 64, 70), (128, 96, 33), (256, 256, 5))


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Rows of any width, slots of all heads and of each, none, and keys that turn."""
    draw = Draw(device, dtype)
    for width in WIDTHS:
        kind = torch.uint8 if dtype is torch.uint8 else None
        x = (
            draw.whole(0, 256, 2, 3, 70, width, dtype=kind)
            if kind
            else draw.normal(2, 3, 70, width)
        )
        yield (x, draw.whole(0, 70, 2, 3, 65)), {}
        yield (x, draw.whole(0, 70, 33, dtype=torch.int32)), {}
    yield (x, draw.whole(0, 70, 0)), {}
    if not dtype.is_floating_point:
        return  # codes are not turned
    for D, R, n in TURNS:
        x = draw.normal(1, 70, 2, D).transpose(1, 2)
        pair = torch.arange(R // 2, dtype=torch.float32, device=device)
        inv_freq = 10000.0 ** (-pair / (R // 2))
        for shape in ((n,), (1, 2, n)):
            turn = {"by": draw.whole(-500, 500, *shape), "inv_freq": inv_freq}
            yield (x, draw.whole(0, 70, *shape)), turn


def differs(
    got: Tensor, x: Tensor, slots: Tensor, *, by: Tensor | None = None,
    inv_freq: Tensor | None = None,
) -> str | None:  # fmt: skip
    """Why the kept rows are wrong, or None."""
    kept = reference(x, slots)
    if got.shape != kept.shape or got.dtype is not kept.dtype:
        return f"shape or type is wrong for rows of {x.shape[-1]} {x.dtype}"
    R = 0 if inv_freq is None else 2 * inv_freq.shape[0]
    if not torch.equal(got[..., R:], kept[..., R:]):
        return f"rows of {x.shape[-1]} {x.dtype} are not those of the slots"
    if inv_freq is None:
        return None
    turned = reference(x, slots, by=by, inv_freq=inv_freq)
    exact = reference(x.double(), slots, by=by, inv_freq=inv_freq)
    return over_budget("turned keys", got, turned, exact, slack=HARDWARE)
