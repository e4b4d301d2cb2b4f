"""Biases of slots, with which those that stay get as much attention as a whole prompt did.

Attention Matching (arXiv:2602.16284) adds a bias to the logits of each slot, by non-negative least
squares on what reference queries give. That would be one more number a slot, and a term in every
operation that attends. But queries of one head are alike in a direction, so that a vector `u` of
the head has nearly the same product with all of them, and a key moved by its bias times `u` has the
bias in its logits. So biases are in the keys, before these are rounded, and cost nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch.cache.references import RIDGE, References

MOST = 3.0  # largest bias, of either sign
ROUNDS = 20  # of projected gradients
ALIKE = 1e-2  # ridge of `direction`, of the mean of squares


def with_biases(
    references: Sequence[References], prompt: Tensor, keys: Tensor, there: Tensor
) -> Tensor:
    """Keys moved so that references give them what they gave the whole prompt.

    Args:
        references: who asks.
        prompt: keys of the whole prompt `[B, H, T, D]`.
        keys: of the slots that stay `[B, H, N, D]`.
        there: which of them are slots `[H, N]`.

    Returns:
        `[B, H, N, D]`; keys that would not be finite in their type are as they were.
    """
    bias, along = biases(references, prompt, keys, there), direction(references, keys)
    moved = (keys + bias[..., None] * along[:, :, None]).to(keys.dtype)
    return torch.where(moved.isfinite(), moved, keys)


def biases(references: Sequence[References], prompt: Tensor, keys: Tensor, there: Tensor) -> Tensor:
    """Biases `[B, H, N]`, at most `MOST` of either sign; arguments as of `with_biases`.

    Slot j gets `exp(b_j)` times its attention. Least squares over references of the slots' sum to
    the prompt's, both as shares of all that a reference attends to, the tokens beside included; the
    ridge draws towards biases of 0.
    """
    kind = torch.promote_types(keys.dtype, torch.float32)
    prompt, keys = prompt.to(kind), keys.to(kind)
    shares, wants = list[Tensor](), list[Tensor]()
    for asked in references:
        for rows, near in asked.rows(kind):
            every = torch.cat([asked.logits(rows, prompt), near], -1)
            total = every.logsumexp(-1, keepdim=True)
            own = asked.logits(rows, keys).masked_fill_(~there[:, None], float("-inf"))
            shares.append((own - total).exp())
            wants.append((every[..., : prompt.shape[2]] - total).exp().sum(-1))
    share, want = torch.cat(shares, 2), torch.cat(wants, 2)
    given = share.square().sum(2)
    ridge = RIDGE * given.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
    return bounded(share, want, ridge.clamp_min(torch.finfo(kind).tiny)).log().clamp(-MOST, MOST)


def bounded(share: Tensor, want: Tensor, ridge: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Weights `w` of least `|share @ w - want|^2 + ridge |w - 1|^2`, none below `exp(-MOST)`.

    By accelerated projected gradients (FISTA), scaled by the diagonal.

    Args:
        share: `[B, H, R, N]`.
        want: `[B, H, R]`.
        ridge: `[B, H, 1]`.
        rounds: how many steps.

    Returns:
        `[B, H, N]`.
    """
    unit = (share.square().sum(2) + ridge).rsqrt()
    share, ridge = share * unit[:, :, None], ridge * unit**2  # of w / unit from here on
    right = _times(share.mT, want) + ridge / unit
    least = torch.exp(torch.tensor(-MOST)) / unit
    found = torch.ones_like(unit)
    for _ in range(10):  # the largest eigenvalue, by powers
        found = _times(share.mT, _times(share, found)) + ridge * found
        largest = found.norm(dim=-1, keepdim=True)
        found = found / largest
    step = 1 / (1.1 * largest)
    now = ahead = 1 / unit
    t = 1.0
    for _ in range(rounds):
        slope = _times(share.mT, _times(share, ahead)) + ridge * ahead - right
        last, now = now, torch.maximum(ahead - step * slope, least)
        t, before = (1 + (1 + 4 * t * t) ** 0.5) / 2, t
        ahead = now + (before - 1) / t * (now - last)
    return now * unit


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None])[..., 0]


def direction(references: Sequence[References], like: Tensor) -> Tensor:
    """The vector of each head `[B, H, D]` whose product with scaled references is nearest to 1."""
    kind = torch.promote_types(like.dtype, torch.float32)
    rows = torch.cat([rows for asked in references for rows, _ in asked.rows(kind)], 2)
    gram = rows.mT @ rows
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += ALIKE * diagonal.mean(-1, keepdim=True)
    low, failed = torch.linalg.cholesky_ex(gram)
    found = torch.cholesky_solve(rows.sum(2)[..., None], low)[..., 0]
    return found.masked_fill(failed[..., None] > 0, 0.0)
