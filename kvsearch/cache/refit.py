"""Values of the slots that a prompt leaves, fitted to what the whole prompt would answer.

Attention Matching (arXiv:2602.16284). Reference queries ask the keys and values of the whole
prompt, and ridge least squares finds the values with which the slots that stay, by their keys as
they are read back, answer alike: eviction and the rounding of keys are repaired at once. The ridge
draws towards the values that the slots had, and so decides where queries are alike. With biases,
which are in the keys, the slots first get the attention that the whole prompt had.

References are the queries of the second reading. Like the queries that follow the prompt they see
every slot of it, and beside these the tokens that come with them, up to their own: what those are
given of the attention is no slot's.

A head that keeps next to nothing of what is looked at, such as its sinks alone, can be fitted only
by values that are far too large where less lies beside the slots than beside references. So a head
is left as it was where its fitted values answer references much worse than the old ones once
nothing lies beside.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsearch.cache.biases import with_biases
from kvsearch.cache.layer import Layer
from kvsearch.cache.references import RIDGE, Answers, References
from kvsearch_kernels.picking import gather

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


class Slots:
    """The slots of a compacted layer, heads side by side, each padded to as many as the largest.

    Attributes:
        there: which of them are slots `[H, N]`.
        lost: heads that lost some of a prompt `[H]`.
    """

    def __init__(self, layer: Layer, prompt: int) -> None:
        self.groups, self.prompt = layer.groups, prompt
        self.sizes = [group.store.n for group in layer.groups]
        each = zip(layer.groups, self.sizes, strict=True)
        held = [n for group, n in each for _ in group.heads]
        self.most, count = max(held), torch.tensor(held, device=layer.groups[0].store.device)
        self.there = torch.arange(self.most, device=count.device) < count[:, None]
        self.lost = count < prompt

    def join(self, each: Iterable[Tensor]) -> Tensor:
        """`[B, H, N, D]` from those of the groups."""
        return torch.cat([pad(x, (0, 0, 0, self.most - x.shape[2])) for x in each], 1)

    def read(self) -> list[Tensor]:
        """Keys and values."""
        sides = zip(*(group.read() for group in self.groups), strict=True)
        return [self.join(side) for side in sides]

    def write(self, side: int, x: Tensor) -> None:
        """Let heads that lost slots have other keys (side 0) or values (1) `[B, H, N, D]`."""
        for group, n in zip(self.groups, self.sizes, strict=True):
            if n < self.prompt:
                group.store.rewrite(side, x[:, group.heads.start : group.heads.stop, :n])


def refit(layer: Layer, whole: Whole, kept: Sequence[Tensor | None]) -> None:
    """Fit the values of a layer that was just compacted, and its biases where it has such.

    All heads are solved together. Those whose fitted values are not finite in 16 bits, or much
    worse with nothing beside, are left as they were, and `HeadGroup.unfitted` counts them.

    Args:
        layer: whose slots these are.
        whole: what it held before, and who asks.
        kept: of each group the slots that stayed, `[N]` or `[B, H, N]`; None: all of them.
    """
    slots = Slots(layer, whole.keys.shape[2])
    if min(slots.sizes) == slots.prompt:
        return
    answers, old = Answers.of(whole.references, whole.keys, whole.values), slots.read()
    biased, keys = layer.policy.refit == "values+bias", old[0]
    if biased:
        sides = whole.keys.split([len(group.heads) for group in layer.groups], 1)
        first = slots.join(
            k if i is None else gather(k, i) for k, i in zip(sides, kept, strict=True)
        )
        moved = with_biases(answers, first, slots.there, layer.native)
        slots.write(0, moved)
        keys = slots.read()[0]
    values = fitted(answers, keys, old[1], slots.there)
    largest = torch.finfo(layer.native).max
    good = (values.abs() <= largest).all(-1).all(-1)  # NaN is in no order
    good &= ~much_worse_alone(answers, slots.there, old, (keys, values))
    good &= slots.lost
    for group in layer.groups:
        mine = slice(group.heads.start, group.heads.stop)
        group.unfitted += int((slots.lost & ~good)[:, mine].sum())
    slots.write(1, torch.where(good[..., None, None], values.to(old[1].dtype), old[1]))
    if biased and any(group.unfitted for group in layer.groups):
        slots.write(0, torch.where(good[..., None, None], moved, first))


def fitted(answers: Answers, keys: Tensor, values: Tensor, there: Tensor) -> Tensor:
    """Values with which outputs are nearest to those on the whole prompt: ridge least squares.

    Args:
        answers: references, and what the whole prompt answers.
        keys: of the slots that stay `[B, H, N, D]`.
        values: those that they had `[B, H, N, Dv]`; the ridge draws towards these.
        there: which of them are slots `[H, N]`.

    Returns:
        `[B, H, N, Dv]` in fp32 (fp64 of fp64); NaN in heads whose system could not be solved.
    """
    values = values.to(answers.rows.dtype)
    B, H, N = values.shape[:3]
    gram, lacks = values.new_zeros(B, H, N, N), torch.zeros_like(values)
    for part in answers.parts():
        own = part.logits(keys, there)
        total = torch.logaddexp(own.logsumexp(-1, keepdim=True), part.near_mass)
        share, rest = (own - total).exp(), (part.near_mass - total).exp()
        gram += share.transpose(-1, -2) @ share
        lacks += share.transpose(-1, -2) @ (part.whole - share @ values - rest * part.near)
    given = gram.diagonal(dim1=-2, dim2=-1)
    given += RIDGE * given.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
    low, failed = torch.linalg.cholesky_ex(gram)
    found = values + torch.cholesky_solve(lacks, low)
    return found.masked_fill(failed[..., None, None] > 0, float("nan"))


def much_worse_alone(
    answers: Answers, there: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]
) -> Tensor:
    """Whether fitted slots answer much worse than they did, with nothing beside them.

    That is the extreme case: a token that asks later has itself beside them at least.

    Args:
        answers, there: as of `fitted`.
        old: keys and values that the slots had `[B, H, N, D]`.
        new: the fitted ones, values before they are rounded.

    Returns:
        `[B, H]`; False where fitted values are NaN.
    """
    off = [answers.rows.new_zeros(answers.rows.shape[:2]) for _ in (old, new)]
    for part in answers.parts():
        for total, (keys, values) in zip(off, (old, new), strict=True):
            got = part.logits(keys, there).softmax(-1) @ values.to(part.rows.dtype)
            total += (got - part.prompt).square().sum((-1, -2))
    return off[1] > WORSE * off[0]
