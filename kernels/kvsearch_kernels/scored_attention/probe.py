"""Probe of `scored_attention`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, like, over_budget
from kvsearch_kernels.lifetime_attention.probe import inputs
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.scored_attention.reference import reference

#        M    N    D    G  softcap
SHAPES = (
    (63, 200, 64, 3, None),
    (130, 130, 128, 4, None),
    (1, 65, 256, 1, None),
    (33, 65, 64, 1, 20.0),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head size, groups, softcap, one query and many, with and without earlier keys."""
    for seed, (M, N, D, G, softcap) in enumerate(SHAPES):
        draw = Draw(device, dtype, seed)
        qkv = inputs(draw, M, N, D, G, B=2 if seed == 0 else 1)
        yield (*qkv, draw.weights(M)), {"scale": D**-0.5, "softcap": softcap}


def differs(
    got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, weights: Tensor, **kwargs: Any
) -> str | None:
    """Why output and received attention are wrong, or None."""
    exact = reference(q.double(), k.double(), v.double(), weights.double(), **kwargs)
    low = reference(q, k, v, weights, **kwargs)
    high = reference(q.float(), k.float(), v.float(), weights, **kwargs)
    for what, *found in zip(("output", "received attention"), got, low, high, exact, strict=True):
        yard = like(*found[:3])
        if reason := over_budget(what, found[0], yard, found[3], slack=HARDWARE):
            return reason
    return None
