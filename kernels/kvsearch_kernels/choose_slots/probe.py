"""Probe of `choose_slots`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.choose_slots.reference import reference
from kvsearch_kernels.probing import Case, Draw

SPANS = (  # slots, dropped, sinks, recent window, tiers, sinks and newest slots in 16 bits
    (70, 16, 4, 20, (), 0, 0),
    (70, 16, 4, 20, (9, 30, 11), 4, 0),
    (129, 1, 0, 0, (40, 88), 0, 0),
    (64, 40, 2, 22, (0, 5, 3, 14), 0, 2),
    (50, 0, 3, 8, (20, 30), 0, 0),
    (33, 5, 0, 1, (28,), 0, 0),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Scores of which many are equal, below zero or infinite; pools of all voters and of each."""
    for seed, (n, gone, sinks, recent, counts, *native) in enumerate(SPANS):
        draw = Draw(device, dtype, seed)
        scores = draw.normal(2, 3, n, dtype=torch.float32)
        scores[0] = (scores[0] * 2).round()  # both zeros are there
        scores[1, 0, ::7] = float("inf")
        scores[1, 1, ::5] = float("-inf")
        pools = draw.whole(0, len(counts) + 1, *(() if seed == 1 else (2, 3)), n, dtype=torch.uint8)
        more = dict(zip(("fp16_sinks", "fp16_recent"), native, strict=True))
        yield (
            (scores, pools),
            {"gone": gone, "sinks": sinks, "recent": recent, "counts": counts, **more},
        )


def differs(got: tuple[Tensor, Tensor | None], *args: Any, **more: Any) -> str | None:
    """Why another choice was made, or None."""
    for what, x, y in zip(("slots", "pools"), got, reference(*args, **more), strict=True):
        if x is None or y is None:
            if x is not y:
                return f"{what} must be None without tiers, and only then"
        elif x.dtype is not y.dtype or not torch.equal(x, y):
            return f"other {what} than the reference, with {more}"
    return None
