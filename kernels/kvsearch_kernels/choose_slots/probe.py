"""Probe of `choose_slots`."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import torch

from kvsearch_kernels.choose_slots.reference import reference
from kvsearch_kernels.choose_slots.request import Ask, Choice, Sums
from kvsearch_kernels.probing import Case, Draw

SPANS = (  # slots, dropped, sinks, recent window, tiers, sinks and newest slots in 16 bits
    (70, 16, 4, 20, (), 0, 0),
    (70, 16, 4, 20, (9, 30, 11), 4, 0),
    (129, 1, 0, 0, (40, 88), 0, 0),
    (64, 40, 2, 22, (0, 5, 3, 14), 0, 2),
    (50, 0, 3, 8, (20, 30), 0, 0),
    (33, 5, 0, 1, (28,), 0, 0),
    (40, 0, 2, 52, (9, 29), 2, 0),  # all are recent
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Scores of which many are equal, below zero or infinite; pools of all voters and of each.

    Stores one by one, then all of them at once, which differ in everything: whether places
    are wanted, and which sums move with the slots.
    """
    asks = []
    for seed, (n, gone, sinks, recent, counts, first, last) in enumerate(SPANS):
        draw = Draw(device, dtype, seed)
        scores = draw.normal(1 + seed % 2, 3, n, dtype=torch.float32)
        scores[0] = (scores[0] * 2).round()  # both zeros are there
        scores[-1, 0, ::7] = float("inf")
        scores[-1, 1, ::5] = float("-inf")
        shape = () if seed == 1 else scores.shape[:2]
        pools = draw.whole(0, len(counts) + 1, *shape, n, dtype=torch.uint8)
        asks.append(Ask(scores, pools, gone, sinks, recent, counts, first, last))
    for ask in asks:
        yield ([ask],), {}
    lying = [_lying(ask, i, Draw(device, dtype, 9 + i)) for i, ask in enumerate(asks)]
    yield ([*asks, *lying],), {}


def _lying(ask: Ask, i: int, draw: Draw) -> Ask:
    """The same for slots that lie somewhere, and hold sums; every one differs from the others."""
    B, V, N = ask.scores.shape
    n = N - ask.gone
    places = draw.normal(B, V, N).argsort(-1) if i % 3 else None
    after = None if ask.counts else draw.whole(0, 3, n, dtype=torch.uint8)
    sums = draw.normal(B, V, N + 5, dtype=torch.float32)[..., :N]
    born = draw.whole(0, 900, B, V, N, dtype=torch.int32) if i % 4 else None
    divisors = None if i % 2 else 1 + 100 * draw.weights(1000)
    held = Sums(sums, born, 900 + i, i % 3 == 1, divisors)
    return replace(
        ask, pools=None if i == 3 else ask.pools, room=n + 7 * i, places=places, after=after,
        kinds=1 if after is None else 3, held=held,
    )  # fmt: skip


def differs(got: Sequence[Choice], asks: Sequence[Ask]) -> str | None:
    """Why another choice was made, or None."""
    if len(got) != len(asks):
        return f"{len(got)} choices for {len(asks)} stores"
    for mine, right, ask in zip(got, reference(asks), asks, strict=True):
        for what in (field.name for field in fields(Choice)):
            x, y = getattr(mine, what), getattr(right, what)
            if x is None or y is None:
                if x is not y:
                    return f"{what} must be None where it is not wanted, and only there"
            elif x.dtype is not y.dtype or not torch.equal(x, y):
                dropped = f"{ask.gone} of {ask.scores.shape[-1]} dropped, tiers {ask.counts}"
                return f"other {what} than the reference, with {dropped}"
    return None
