"""Queries of tokens that read a prompt again, and what it answers; `refit` fits slots to these."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvsearch.cache.call import Call

MOST = 256  # positions of a prompt whose queries are references
ROWS = 512  # references of one attention map
RIDGE = 0.1  # of fits to them: of what slots are given on average, squared and summed over these


@dataclass(frozen=True)
class References:
    """Evenly spaced queries of tokens that read a prompt again.

    Attributes:
        call: these queries `[B, Hq, R, D]`, and the keys and values of all of the tokens
            `[B, H, M, D]`.
        step: tokens from one query to the next.
    """

    call: Call
    step: int

    @classmethod
    def of(cls, call: Call, prompt: int) -> "References":
        """Of a call that reads some of a prompt of so many tokens again."""
        step = -(-prompt // MOST)
        return cls(replace(call, q=call.q[:, :, ::step].clone(), predicted=None), step)

    def rows(self, kind: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Scaled queries `[B, H, R', D]`, some at a time, and their logits on the call's own keys
        `[B, H, R', M]`."""
        call, H = self.call, self.call.k.shape[1]
        q, k = call.q.to(kind).unflatten(1, (H, -1)) * call.scale, call.k.to(kind)
        at = torch.arange(0, self.step * q.shape[3], self.step, device=q.device)
        own = torch.arange(k.shape[2], device=q.device)
        many = max(1, ROWS // q.shape[2])
        for some, now in zip(q.split(many, 3), at.split(many), strict=True):
            rows, late = some.flatten(2, 3), own > now.repeat(q.shape[2])[:, None]
            near = capped(rows @ k.transpose(-1, -2), call.softcap)
            yield rows, near.masked_fill_(late, float("-inf"))


@dataclass(frozen=True)
class Answers:
    """What a prompt answers to references, and the tokens that come with them up to their own.

    Attention to both, or to other slots beside these tokens, follows from the two apart.

    Attributes:
        rows: scaled queries `[B, H, R, D]`.
        prompt: output over the prompt's slots alone `[B, H, R, Dv]`.
        prompt_mass: logarithm of the sum of their exponentials `[B, H, R, 1]`.
        near: output over the tokens that come with the references alone.
        near_mass: as `prompt_mass`.
        softcap: bound of the scaled products, if the model has one.
    """

    rows: Tensor
    prompt: Tensor
    prompt_mass: Tensor
    near: Tensor
    near_mass: Tensor
    softcap: float | None = None

    @classmethod
    def of(cls, references: Sequence[References], keys: Tensor, values: Tensor) -> "Answers":
        """Of the keys and values of a whole prompt `[B, H, T, D]`; fp32, or fp64 of fp64."""
        kind = torch.promote_types(keys.dtype, torch.float32)
        keys, values = keys.to(kind), values.to(kind)
        found = list[tuple[Tensor, ...]]()
        for asked in references:
            beside = asked.call.v.to(kind)
            for rows, near in asked.rows(kind):
                s = capped(rows @ keys.transpose(-1, -2), asked.call.softcap)
                sides = ((s, values), (near, beside))
                each = [(x.softmax(-1) @ v, x.logsumexp(-1, keepdim=True)) for x, v in sides]
                found.append((rows, *each[0], *each[1]))
        rows, prompt, mass, near, near_mass = (torch.cat(x, 2) for x in zip(*found, strict=True))
        return cls(rows, prompt, mass, near, near_mass, references[0].call.softcap)

    def parts(self) -> "Iterator[Answers]":
        """So many references at a time as one attention map may have."""
        every = self.rows, self.prompt, self.prompt_mass, self.near, self.near_mass
        for rows, prompt, mass, near, near_mass in zip(
            *(x.split(ROWS, 2) for x in every), strict=True
        ):
            yield Answers(rows, prompt, mass, near, near_mass, self.softcap)

    def logits(self, keys: Tensor, there: Tensor) -> Tensor:
        """On other keys `[B, H, N, D]`, of which `[H, N]` are `there`: `[B, H, R, N]`."""
        s = capped(self.rows @ keys.to(self.rows.dtype).transpose(-1, -2), self.softcap)
        return s.masked_fill_(~there[:, None], float("-inf"))

    @property
    def whole(self) -> Tensor:
        """Output over the prompt's slots and the tokens beside `[B, H, R, Dv]`."""
        return self.near + self.share * (self.prompt - self.near)

    @property
    def share(self) -> Tensor:
        """What the prompt's slots get of the attention `[B, H, R, 1]`."""
        return (self.prompt_mass - self.near_mass).sigmoid()


def capped(s: Tensor, softcap: float | None) -> Tensor:
    """Scaled products as the model bounds them."""
    return s if softcap is None else softcap * torch.tanh(s / softcap)
