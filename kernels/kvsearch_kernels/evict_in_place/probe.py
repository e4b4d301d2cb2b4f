"""Probe of `evict_in_place`. The op writes to its arguments: what was there is drawn anew."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.evict_in_place.reference import Evictions, replayed
from kvsearch_kernels.evict_in_place.triton_impl import MOST_WIDE
from kvsearch_kernels.probing import Case, Draw

# head size -> sequences, heads, query heads of each, slots kept, tokens of an interval, intervals
SHAPES = {64: (2, 2, 3, 90, 8, 5), 128: (1, 2, 1, 150, 1, 6), 256: (1, 1, 5, 40, 24, 3)}
SEEN = 300


def before(D: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Slots in no order of time, and their sums and births."""
    B, H, _, n, c, _ = SHAPES[D]
    draw = Draw(device, dtype, seed=D)
    slots = draw.normal(2, B, H, n + c, D)
    sums = draw.normal(B, H, n + c, dtype=torch.float32).abs() * 3
    sums[..., n:] = 0
    order = draw.normal(B, H, n, dtype=torch.float32).argsort(-1)
    born = torch.nn.functional.pad(order + SEEN - n, (0, c))
    return slots, sums, born


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head size, with ages, softcap, a recent window, sinks, and sums that are forgotten."""
    for D, (B, H, G, n, c, J) in SHAPES.items():
        if dtype is torch.float32 and D > MOST_WIDE:
            continue
        draw = Draw(device, dtype)
        queries = draw.normal(J, B * H, G * c, D) * D**-0.5
        new, kept = (draw.normal(J, 2, B, H, c, D) for _ in range(2))
        weights = draw.weights(c) * n / G
        ages = torch.arange(1, SEEN + J * c + 2, device=device).float() ** 0.7
        plain = Evictions(SEEN, 4, n + c)
        for how in (
            replace(plain, divisors=ages, carry=0.8),
            replace(plain, last=n, softcap=2.0),
            replace(plain, recent=2, forgets=True),
        ):
            yield (*before(D, device, dtype), queries, new, kept, weights, how), {}


def differs(
    got: Tensor, slots: Tensor, sums: Tensor, born: Tensor, queries: Tensor, new: Tensor,
    kept: Tensor, weights: Tensor, how: Evictions,
) -> str | None:  # fmt: skip
    """Why the outputs, or what is in the slots now, are wrong, or None."""
    D, cpu = slots.shape[-1], torch.device("cpu")

    def run(q: Tensor, kind: torch.dtype | None) -> tuple[Tensor, ...]:
        mine = before(D, cpu, queries.dtype)
        return replayed(*mine, q, new, kept, weights, how, kind), *mine

    eager, _, plain, _ = run(queries, queries.dtype)
    exact, held, right, births = run(queries.double(), None)
    if not torch.equal(born, births):
        return "other tokens were evicted, or they lie elsewhere"
    if not torch.equal(slots, held):
        return "slots hold other keys or values"
    if reason := over_budget("sums", sums, plain, right, slack=HARDWARE):
        return reason
    return over_budget("output", got, eager, exact, slack=HARDWARE)
