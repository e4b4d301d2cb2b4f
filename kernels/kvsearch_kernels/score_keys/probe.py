"""Probe of `score_keys`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.lifetime_attention.probe import inputs, lives
from kvsearch_kernels.lifetime_attention.reference import reference as attention
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.score_keys.reference import reference

#        M    E    D    G  first softcap reduce
SHAPES = (
    (130, 200, 64, 3, 100, None, "sum"),
    (65, 100, 128, 4, 40, None, "sum"),
    (33, 70, 256, 1, 40, None, "sum"),
    (40, 63, 64, 1, 0, 20.0, "max"),
    (5, 65, 64, 3, 0, None, "max"),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head size, groups, both sums, softcap, ragged blocks, keys that no row sees."""
    for seed, (M, E, D, G, first, softcap, reduce) in enumerate(SHAPES):
        draw = Draw(device, dtype, seed)
        q, k, v = inputs(draw, M, E, D, G, B=2 if seed == 0 else 1)
        birth, death = lives(draw, E, first, M)
        at = {"first_query": first, "scale": D**-0.5, "softcap": softcap}
        _, lse = attention(q.float(), k.float(), v.float(), birth, death, **at)
        yield (q, k, lse, draw.weights(M), birth, death), {**at, "reduce": reduce}
    dead = torch.zeros_like(birth)
    blind = torch.full_like(lse, float("-inf"))
    yield (q, k, blind, draw.weights(M), dead, dead), {"first_query": 3, "scale": 0.125}


def differs(got: Tensor, q: Tensor, k: Tensor, lse: Tensor, *rest: Tensor, **kw: Any) -> str | None:
    """Why scores are wrong, or None."""
    exact = reference(q.double(), k.double(), lse.double(), *rest, **kw)
    yard = reference(q.float(), k.float(), lse, *rest, **kw)
    return over_budget("scores", got, yard, exact, slack=HARDWARE)
