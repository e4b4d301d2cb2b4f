"""Probe of `lifetime_attention`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.lifetime_attention.reference import reference, visibility
from kvsearch_kernels.probing import Case, Draw

NEVER = 1 << 40


def inputs(
    draw: Draw, M: int, E: int, D: int, G: int, B: int = 1, H: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[B, G H, M, D]`, keys and values `[B, H, E, D]`."""
    return draw.normal(B, G * H, M, D), draw.normal(B, H, E, D), draw.normal(B, H, E, D)


def lives(draw: Draw, E: int, first: int, M: int) -> tuple[Tensor, Tensor]:
    """Keys born at random `[E]`, some before all queries, some for ever, some dead at once."""
    birth = draw.whole(max(first - E // 2, 0), first + M, E)
    birth[: E // 3] = 0
    death = birth + draw.whole(0, 2 * M + 2, E)
    death[::5] = NEVER
    return birth, death


#        M    E    D    G  first softcap; two query blocks and several key blocks, none of them full
SHAPES = (
    (130, 300, 64, 3, 200, None),
    (65, 150, 128, 4, 100, None),
    (33, 70, 256, 1, 40, None),
    (40, 63, 64, 1, 0, 20.0),
    (1, 1, 64, 2, 0, None),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head size, groups, softcap, ragged blocks, rows without keys, no keys, anchors."""
    for seed, (M, E, D, G, first, softcap) in enumerate(SHAPES):
        draw = Draw(device, dtype, seed)
        own = lives(draw, E, first, M) if E > 1 else (draw.whole(0, 1, 1), draw.whole(9, 10, 1))
        at = {"first_query": first, "scale": D**-0.5, "softcap": softcap}
        yield (*inputs(draw, M, E, D, G), *own), at
    draw = Draw(device, dtype, 9)
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(draw, 70, 70, 64, 3, B=2)
    )
    every = torch.arange(70, device=device)
    late = {"first_query": 0, "scale": 0.125}
    yield (q, k, v, every.clamp_min(5), every + 20), late  # strided; the first five see nothing
    for E in (7, 0):
        dead = torch.zeros(E, dtype=torch.int64, device=device)
        yield (q[:, :, :5], k[:, :, :E], v[:, :, :E], dead, dead), late
    yield from _anchors(draw)


def _anchors(draw: Draw) -> Iterator[Case]:
    """A text of sequences, each summed up by its last token; all of it, and its end."""
    T, marks = 150, torch.tensor([5, 6, 70, 130, 149], device=draw.device)
    every = torch.arange(T, device=draw.device)
    end = marks[torch.searchsorted(marks, every)]
    death = torch.where(end == every, NEVER, end + 1)
    anchors = torch.where(end == every, every, -1)
    for first in (0, 120):
        at = {"first_query": first, "scale": 0.125, "anchors": anchors}
        yield (*inputs(draw, T - first, T, 64, 3), every, death), at


def eager(
    q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor, *, first_query: int,
    scale: float, softcap: float | None = None, anchors: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The output `[B, Hq, M, Dv]` the plain way, everything in the type of `q`."""
    H, M = k.shape[1], q.shape[2]
    s = ((q * scale).unflatten(1, (H, -1)).flatten(2, 3) @ k.mT).unflatten(2, (-1, M))
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~visibility(birth, death, anchors, first_query, M), float("-inf"))
    p = s.softmax(-1).nan_to_num()
    return (p.flatten(2, 3) @ v).unflatten(2, (-1, M)).flatten(1, 2)


def differs(
    got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor,
    **kwargs: Any,
) -> str | None:  # fmt: skip
    """Why output and log-sum-exp are wrong, or None; the log-sum-exp is held to fp32."""
    exact = reference(q.double(), k.double(), v.double(), birth, death, **kwargs)
    low = eager(q, k, v, birth, death, **kwargs)
    high = reference(q.float(), k.float(), v.float(), birth, death, **kwargs)
    if got[0].dtype is not q.dtype or got[1].dtype is not torch.float32:
        return f"types are {got[0].dtype} and {got[1].dtype}"
    return over_budget("output", got[0], low, exact[0], slack=HARDWARE) or over_budget(
        "log-sum-exp", got[1], high[1], exact[1], slack=HARDWARE
    )
