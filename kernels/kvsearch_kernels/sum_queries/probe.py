"""Probe of `sum_queries`. The op writes to its arguments, so the sums before it are always 1."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.sum_queries.reference import reference

PLACES = (  # position of an empty part, and tokens that are left out
    {"ahead": 0}, {"ahead": 5, "skip": 12}, {"ahead": 5, "skip": 13}, {"ahead": 90_000, "skip": 4},
)  # fmt: skip


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head_dim, with and without products, of whole and of partly turned heads."""
    draw = Draw(device, dtype)
    lengths = torch.full((2, 2), 7, dtype=torch.int32, device=device)  # so 12 is a position
    for D, products, place in zip((64, 128, 256, 64), (1, 1, 1, 0), PLACES, strict=True):
        pairs = D // 2 if products else D // 4
        pair = torch.arange(pairs, dtype=torch.float32, device=device)
        inv_freq = 10_000 ** -(pair / pairs)
        widths, kind = (D, D * (D + 1) // 2), torch.float32
        ones = [torch.ones(2, 6, n, dtype=kind, device=device) for n in widths]
        place = dict(place)
        ahead = torch.full((1,), place.pop("ahead"), dtype=torch.int32, device=device)
        asked = ones[0], ones[1] if products else None, inv_freq, lengths, ahead
        yield (draw.normal(2, 6, D), *asked), place


def differs(
    got: tuple[Tensor, Tensor | None], q: Tensor, total: Tensor, outer: Tensor | None,
    inv_freq: Tensor, lengths: Tensor, ahead: Tensor, **place: int,
) -> str | None:  # fmt: skip
    """Why the sums are wrong, or None."""
    pair = (total, outer)

    def run(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor | None]:
        ones = [None if y is None else torch.ones(y.shape, dtype=kind, device="cpu") for y in pair]
        assert ones[0] is not None
        return reference(x, ones[0], ones[1], inv_freq, lengths, ahead, **place)

    eager, exact = run(q, torch.float32), run(q, torch.float64)
    # a cosine next to where `q`'s type rounds up instead of down, in each factor
    room = 4 * torch.finfo(q.dtype).eps * float(q.abs().max()) ** 2
    for what, mine, yard, right in zip(("sums", "products"), got, eager, exact, strict=True):
        if mine is None or yard is None or right is None:
            if mine is not right:
                return f"{what} are missing or too many"
        elif reason := over_budget(what, mine, yard, right, room=room, slack=HARDWARE):
            return reason
    return None
