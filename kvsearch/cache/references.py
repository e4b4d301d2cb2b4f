"""Queries of tokens that read a prompt again; values are fitted to them (`refit`)."""

from collections.abc import Iterator
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
            yield rows, self.logits(rows, k).masked_fill_(late, float("-inf"))

    def logits(self, rows: Tensor, k: Tensor) -> Tensor:
        """Logits `[B, H, R', N]` of scaled queries on keys `[B, H, N, D]`."""
        s, softcap = rows @ k.transpose(-1, -2), self.call.softcap
        return s if softcap is None else softcap * torch.tanh(s / softcap)
