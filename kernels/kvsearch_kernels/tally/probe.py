"""Probe of `tally`. The op writes to its first argument, so what was there before is always 1."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.tally.reference import reference

RULES: tuple[dict[str, float | int | None], ...] = (
    {"held": 0},
    {"held": 30, "alpha": 1.0},
    {"held": 1000, "alpha": 0.7, "keep": 0.99},
    {"held": 3, "alpha": 1.0, "end": 11, "horizon": 5},  # of length 7: the first row that counts
    {"held": 3, "end": 13, "horizon": 6},  # of length 7: the last that does not
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Heads apart and together, slots in order and not, in the first of two partial sums."""
    draw = Draw(device, torch.float32)
    B, H, N = 2, 3, 600
    lengths = torch.full((B, H), 7, dtype=torch.int32, device=device)
    every = torch.arange(N - 1, -1, -1, device=device)
    mixed = torch.stack([every.roll(i) for i in range(B * H)]).view(B, H, N)
    for voters, orders in ((H, (None, every, mixed)), (1, (every, mixed[:1, :1]))):
        for rule, order in zip(RULES * 2, (*orders, *orders, *orders), strict=False):
            received = draw.normal(B, H, N).abs()
            sums = torch.ones(2, B, voters, N + 8, dtype=torch.float32, device=device)[0, :, :, :N]
            yield (sums, received, order, lengths), dict(rule)


def differs(
    got: Tensor, sums: Tensor, received: Tensor, order: Tensor | None, lengths: Tensor,
    **rule: float,
) -> str | None:  # fmt: skip
    """Why the sums are wrong, or None."""
    before = torch.ones(sums.shape, dtype=torch.float32, device="cpu")
    eager = reference(before.clone(), received, order, lengths, **rule)  # type: ignore[arg-type]
    wide = received.double()
    exact = reference(before.double(), wide, order, lengths, **rule)  # type: ignore[arg-type]
    return over_budget("sums", got, eager, exact, slack=HARDWARE)
