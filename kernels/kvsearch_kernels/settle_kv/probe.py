"""Probe of `settle_kv`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.probe import MOST_WRONG, steady
from kvsearch_kernels.quantize_kv.reference import Format
from kvsearch_kernels.settle_kv.reference import Pair, reference


def _even(bits: int, group: int = 32) -> Format:
    return Format(bits, group)


def _lloyd(bits: int) -> Format:
    return Format(bits, 64, "lloyd", rotate=True)


def _blocks(bits: int) -> Format:
    return Format(bits, 64, "lloyd", rotate=True, block=16)


LAYERS: tuple[tuple[int, tuple[Pair, ...]], ...] = (
    (64, ((None, None), (_even(8, 64), _even(4)), (_even(3), _even(5)))),
    (128, ((_lloyd(4), _blocks(2)), (_even(2), _even(1)))),
    (64, ((_even(4), None),)),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Slots of all heads and of each that stay, or all; memory for more; nothing that stays."""
    draw = Draw(device, dtype)
    for D, tiers in LAYERS:
        N, pools = 37, len(tiers) + 1
        k, v = (draw.normal(2, 2, N + 3, D)[:, :, :N] for _ in range(2))
        for keep in (None, draw.whole(0, N, 2, 2, 21), draw.whole(0, N, 1, 1, 18)):
            n = N if keep is None else keep.shape[-1]
            before = draw.whole(0, pools, 2, 2, N, dtype=torch.uint8)
            after = draw.whole(0, pools, 2, 2, n, dtype=torch.uint8)
            yield (k, v, before, after, tiers), {"keep": keep, "room": n + 5}
        one = draw.whole(0, pools, N, dtype=torch.uint8)
        yield (k, v, one, one.flip(0), tiers), {}


def differs(
    got: tuple[Tensor, Tensor], k: Tensor, v: Tensor, before: Tensor, after: Tensor,
    tiers: Sequence[Pair], *, keep: Tensor | None = None, room: int = 0,
) -> str | None:  # fmt: skip
    """Why the result is wrong, or None. What changes no pool must be there bit for bit."""
    want = reference(k, v, before, after, tiers, keep=keep, room=room)
    n, heads = after.shape[-1], k.shape[:2]
    stay = torch.arange(n, device=k.device) if keep is None else keep
    was = before.expand(*heads, before.shape[-1]).gather(2, stay.expand(*heads, n).long())
    moved = was != after
    for side, (what, x, y) in enumerate(zip(("keys", "values"), got, want, strict=True)):
        if x.shape != y.shape or x.dtype is not y.dtype:
            return f"shape or type of {what} is wrong"
        same = (x[:, :, :n] == y[:, :, :n]).all(-1)
        if not bool(same[~moved.expand_as(same)].all()):
            return f"{what} that enter no tier are not those of the slots"
        formats = [pair[side] for pair in tiers]
        exact = all(f is None or steady(f) for f in formats)
        mine, right = (z[:, :, :n].float() for z in (x, y))
        close = torch.isclose(mine, right, rtol=2e-3, atol=2e-3).all(-1)
        wrong = float((~(same if exact else close)).float().mean())
        if wrong > (0 if exact else MOST_WRONG):
            return f"{wrong:.0%} of {what} differ from the reference, in {formats}"
    return None
