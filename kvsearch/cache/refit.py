"""Values of the slots that a prompt leaves, fitted to what the whole prompt would answer.

Attention Matching (arXiv:2602.16284) without its biases. Reference queries ask the keys and values
of the whole prompt, and ridge least squares finds the values with which the slots that stay, by
their keys as they are read back, answer alike: eviction and the rounding of keys are repaired at
once. The ridge draws towards the values that the slots had, and so decides where queries are alike.

References are the queries of the second reading. Like the queries that follow the prompt they see
every slot of it, and beside these the tokens that come with them, up to their own: what those are
given of the attention is no slot's.

A head that keeps next to nothing of what is looked at, such as its sinks alone, can be fitted only
by values that are far too large where less lies beside the slots than beside references. So a head
is left as it was where its fitted values answer references much worse than the old ones once
nothing lies beside.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsearch.cache.layer import Layer
from kvsearch.cache.references import References

RIDGE = 0.1  # of what slots are given on average, squared and summed over references
ALONE = 4  # one in so many references is asked with nothing beside, too
WORSE = 4  # times the squared error of the old values: more than that leaves a head as it was


@dataclass(frozen=True)
class Whole:
    """What a layer holds of a prompt before its compaction, and who asks for it.

    Attributes:
        keys: of all slots `[B, H, N, D]`.
        values: `[B, H, N, Dv]`.
        references: who asks.
    """

    keys: Tensor
    values: Tensor
    references: Sequence[References]

    @classmethod
    def of(cls, layer: Layer) -> "Whole":
        """Of a layer, which forgets its references."""
        asked, layer.references = layer.references, []
        keys, values = zip(*(group.read() for group in layer.groups), strict=True)
        return cls(torch.cat(keys, 1).clone(), torch.cat(values, 1).clone(), asked)


def refit(layer: Layer, whole: Whole) -> None:
    """Fit the values of a layer whose slots were just compacted, in heads that lost some.

    Heads that differ in slots are solved together, with as many as the largest has. Values that are
    not finite in 16 bits, or much worse with nothing beside, are left as they were, and
    `HeadGroup.unfitted` counts those heads.
    """
    sizes = [group.store.n for group in layer.groups]
    if min(sizes) == whole.keys.shape[2]:
        return
    most, device = max(sizes), whole.keys.device
    sides = zip(*(group.read() for group in layer.groups), strict=True)
    keys, values = (torch.cat([pad(x, (0, 0, 0, most - x.shape[2])) for x in y], 1) for y in sides)
    held = [n for group, n in zip(layer.groups, sizes, strict=True) for _ in group.heads]
    there = torch.arange(most, device=device) < torch.tensor(held, device=device)[:, None]
    found = fitted(whole, keys, values, there)
    worse = much_worse_alone(whole, keys, there, values, found)
    for group, n in zip(layer.groups, sizes, strict=True):
        if n == whole.keys.shape[2]:
            continue
        mine = slice(group.heads.start, group.heads.stop)
        new, old = found[:, mine, :n], values[:, mine, :n]
        good = (new.abs() <= torch.finfo(group.native).max).all(-1).all(-1)  # NaN is in no order
        good &= ~worse[:, mine]
        group.unfitted += int((~good).sum())
        group.store.revalue(torch.where(good[..., None, None], new.to(old.dtype), old))


def fitted(whole: Whole, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """Values with which outputs are nearest to those on the whole prompt: ridge least squares.

    Args:
        whole: what is asked, and what answers.
        keys: of the slots that stay `[B, H, N, D]`.
        values: those that they had `[B, H, N, Dv]`; the ridge draws towards these.
        there: which of them are slots `[H, N]`.

    Returns:
        `[B, H, N, Dv]` in fp32 (fp64 of fp64); NaN in heads whose system could not be solved.
    """
    kind = torch.promote_types(keys.dtype, torch.float32)
    all_k, all_v, keys, values = (x.to(kind) for x in (whole.keys, whole.values, keys, values))
    B, H, N = keys.shape[:3]
    gram, lacks = keys.new_zeros(B, H, N, N), torch.zeros_like(values)
    for asked in whole.references:
        beside = asked.call.v.to(kind)
        every = torch.cat([all_v, beside], 2)
        for rows, near in asked.rows(kind):
            want = torch.cat([asked.logits(rows, all_k), near], -1).softmax(-1) @ every
            own = asked.logits(rows, keys).masked_fill_(~there[:, None], float("-inf"))
            share, rest = torch.cat([own, near], -1).softmax(-1).split((N, near.shape[-1]), -1)
            gram += share.transpose(-1, -2) @ share
            lacks += share.transpose(-1, -2) @ (want - share @ values - rest @ beside)
    given = gram.diagonal(dim1=-2, dim2=-1)
    given += RIDGE * given.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
    low, failed = torch.linalg.cholesky_ex(gram)
    found = values + torch.cholesky_solve(lacks, low)
    return found.masked_fill(failed[..., None, None] > 0, float("nan"))


def much_worse_alone(whole: Whole, keys: Tensor, there: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Whether new values answer much worse than old ones with nothing beside the slots.

    That is the extreme case: a token that asks later has itself beside them at least.

    Args:
        whole, keys, there: as of `fitted`.
        old: those that the slots had `[B, H, N, Dv]`.
        new: the fitted ones, before they are rounded.

    Returns:
        `[B, H]`; False where fitted values are NaN.
    """
    kind = torch.promote_types(keys.dtype, torch.float32)
    all_k, all_v, keys = (x.to(kind) for x in (whole.keys, whole.values, keys))
    both = old.to(kind), new.to(kind)
    off = [keys.new_zeros(keys.shape[:2]) for _ in both]
    for asked in whole.references:
        for rows, _ in asked.rows(kind):
            some = rows[:, :, ::ALONE]
            want = asked.logits(some, all_k).softmax(-1) @ all_v
            own = asked.logits(some, keys).masked_fill_(~there[:, None], float("-inf")).softmax(-1)
            for total, values in zip(off, both, strict=True):
                total += (own @ values - want).square().sum((-1, -2))
    return off[1] > WORSE * off[0]
