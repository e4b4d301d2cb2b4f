"""Probe of `scored_attention`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.lifetime_attention.probe import eager, inputs
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
    """Every head size, groups, softcap, one query and many, earlier keys, large row weights."""
    for seed, (M, N, D, G, softcap) in enumerate(SHAPES):
        draw = Draw(device, dtype, seed)
        qkv = inputs(draw, M, N, D, G, B=2 if seed == 0 else 1)
        # up to the number of keys, as some scores weigh rows: fp16 does not hold the sums
        weights = draw.weights(M) * (9e4 if seed == 1 else 1.0)
        yield (*qkv, weights), {"scale": D**-0.5, "softcap": softcap}


def differs(
    got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, weights: Tensor, **kwargs: Any
) -> str | None:
    """Why output and received attention are wrong, or None; the latter is held to fp32."""
    exact = reference(q.double(), k.double(), v.double(), weights.double(), **kwargs)
    high = reference(q.float(), k.float(), v.float(), weights, **kwargs)
    N = k.shape[2]
    causal = torch.arange(N, device="cpu"), torch.full((N,), N, device="cpu")
    low = eager(q, k, v, *causal, first_query=N - q.shape[2], **kwargs)
    if got[0].dtype is not q.dtype or got[1].dtype is not torch.float32:
        return f"types are {got[0].dtype} and {got[1].dtype}"
    return over_budget("output", got[0], low, exact[0], slack=HARDWARE) or over_budget(
        "received attention", got[1], high[1], exact[1], slack=HARDWARE
    )
