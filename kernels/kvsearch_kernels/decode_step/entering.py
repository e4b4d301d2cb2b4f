"""A token that goes on into its tier at once: a compaction after every token, in place."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.choose_slots.reference import best_between
from kvsearch_kernels.packed_attention.reference import Part
from kvsearch_kernels.picking import gather
from kvsearch_kernels.quantize_kv.reference import Packed, quantize
from kvsearch_kernels.repack_kv.reference import tensors


@dataclass(frozen=True)
class Entering:
    """Where a token goes once it has been attended to.

    The pool in 16 bits holds it alone. The one tier beside has its slots in order of time, and room
    behind them. The token is encoded and comes last there; where more than `target` slots would
    then be held, the one of lowest rank leaves first, of equals the oldest.

    Attributes:
        count: slots of the tier in use `[1]` int64, alike in all heads; written to.
        target: slots that are held at most; None is all.
        sinks: oldest slots that never leave.
        recent: newest slots that do not leave, the token among them.
        born: arrival index of each slot's token, and of the one to come, `[B, V, N]` int32; written
            to. None where sums are ranks, and where there are no sums: then the oldest leaves.
        divisors: what sums are divided by, by age `[A]` fp32; None like `born`.
        forgets: whether sums start anew after every token.
    """

    count: Tensor
    target: int | None
    sinks: int
    recent: int
    born: Tensor | None = None
    divisors: Tensor | None = None
    forgets: bool = False


def in_use(part: Part, how: Entering) -> Part:
    """The slots of the tier that are in use."""
    n = int(how.count)

    def some(held: Tensor | Packed) -> Tensor | Packed:
        if isinstance(held, Packed):
            return Packed(held.codes[:, :, :n], held.scales[:, :, :n])
        return held[:, :, :n]

    return Part(some(part.keys), some(part.values), part.key_format, part.value_format)


def enter(parts: Sequence[Part], sums: Tensor | None, how: Entering) -> None:
    """Let the token in the pool enter the tier, and a slot leave that is full.

    Args:
        parts: the tier and the pool.
        sums: what slots have received `[B, V, N]`; None where no rule ranks by them.
        how: what to do.
    """
    tier, pool = parts
    assert isinstance(pool.keys, Tensor) and pool.lengths is not None
    n, device = int(how.count), pool.keys.device
    keep = torch.arange(n + 1, device=device)
    if how.target is not None and n >= how.target:
        keep = torch.cat([keep[: how.sinks], keep[how.sinks + 1 :]])
        if sums is not None:
            keep = best_between(_ranks(sums, n, how), how.sinks, n + 1 - how.recent, 1)
    m = keep.shape[-1]
    for held, new, fmt in (
        (tier.keys, pool.keys, tier.key_format), (tier.values, pool.values, tier.value_format)
    ):  # fmt: skip
        assert isinstance(new, Tensor)
        token = new[:, :, :1] if fmt is None else quantize(new[:, :, :1].float(), fmt)
        for slots, row in zip(tensors(held), tensors(token), strict=True):
            slots[:, :, :m] = gather(torch.cat([slots[:, :, :n], row], 2), keep)
    for x in (sums, how.born):
        if x is not None:
            newest = x[..., n].clone()
            x[..., :m] = x[..., : n + 1].gather(-1, keep.expand(*x.shape[:2], -1))
            x[..., m] = newest + 1 if x is how.born else 0
    if how.forgets and sums is not None:
        sums.zero_()
    how.count.fill_(m)
    pool.lengths.zero_()


def _ranks(sums: Tensor, n: int, how: Entering) -> Tensor:
    """Of all slots in use, and of the token."""
    ranks = sums[..., : n + 1]
    if how.born is None or how.divisors is None:
        return ranks
    born = how.born[..., : n + 1].long()
    return ranks / how.divisors[born[..., n:] + 1 - born]
