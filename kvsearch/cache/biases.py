"""Biases of slots, with which those that stay get as much attention as a whole prompt did.

Attention Matching (arXiv:2602.16284) adds a bias to the logits of each slot, by non-negative least
squares on what reference queries give. That would be one more number a slot, and a term in every
operation that attends. But queries of one head are alike in a direction, so that a vector `u` of
the head has nearly the same product with all of them, and a key moved by its bias times `u` has the
bias in its logits. So biases are in the keys, before these are rounded, and cost nothing.
"""

from math import exp

import torch
from torch import Tensor

from kvsearch.cache.references import RIDGE, Answers

LARGEST = 3.0  # largest bias, of either sign
ROUNDS = 20  # of projected gradients
ALIKE = 1e-2  # ridge of `direction`, of the mean of squares


def with_biases(answers: Answers, keys: Tensor, there: Tensor, native: torch.dtype) -> Tensor:
    """Keys moved so that references give them what they gave the whole prompt.

    Args:
        answers: who asks, and what the whole prompt got.
        keys: of the slots that stay `[B, H, N, D]`.
        there: which of them are slots `[H, N]`.
        native: the 16-bit type in which keys come.

    Returns:
        `[B, H, N, D]`; keys that would not be finite in 16 bits are as they were.
    """
    bias, along = biases(answers, keys, there), direction(answers)
    moved = (keys + bias[..., None] * along[:, :, None]).to(keys.dtype)
    finite = (moved.abs() <= torch.finfo(native).max).all(-1, keepdim=True)
    return torch.where(finite, moved, keys)


def biases(answers: Answers, keys: Tensor, there: Tensor) -> Tensor:
    """Biases `[B, H, N]`, at most `LARGEST` of either sign; arguments as of `with_biases`.

    Slot j gets `exp(b_j)` times its attention. Least squares over references of the slots' sum to
    the prompt's, both as shares of all that a reference attends to, the tokens beside included; the
    ridge draws towards biases of 0. Those that are too large are cut after they were solved for.
    """
    total = torch.logaddexp(answers.prompt_mass, answers.near_mass)
    share = (answers.logits(keys, there) - total).exp()
    given = share.square().sum(2)
    ridge = RIDGE * given.sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
    ridge = ridge.clamp_min(torch.finfo(share.dtype).tiny)
    return bounded(share, answers.share[..., 0], ridge).log().clamp(-LARGEST, LARGEST)


def bounded(share: Tensor, want: Tensor, ridge: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Weights `w` of least `|share @ w - want|^2 + ridge |w - 1|^2`, none below `exp(-LARGEST)`.

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
    right = _times(want, share) + ridge / unit
    least = exp(-LARGEST) / unit
    found = torch.ones_like(unit)
    for _ in range(10):  # the largest eigenvalue, by powers
        found = _times(_times(found, share.mT), share) + ridge * found
        largest = found.norm(dim=-1, keepdim=True)
        found = found / largest
    step = 1 / (1.1 * largest)
    now = ahead = 1 / unit
    t = 1.0
    for _ in range(rounds):
        slope = _times(_times(ahead, share.mT), share) + ridge * ahead - right
        last, now = now, torch.maximum(ahead - step * slope, least)
        t, before = (1 + (1 + 4 * t * t) ** 0.5) / 2, t
        ahead = now + (before - 1) / t * (now - last)
    return now * unit


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    return (rows[..., None, :] @ matrix)[..., 0, :]  # several times faster than with columns


def direction(answers: Answers) -> Tensor:
    """The vector of each head `[B, H, D]` whose product with scaled references is nearest to 1."""
    gram = answers.rows.mT @ answers.rows
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    diagonal += ALIKE * diagonal.mean(-1, keepdim=True)
    low, failed = torch.linalg.cholesky_ex(gram)
    found = torch.cholesky_solve(answers.rows.sum(2)[..., None], low)[..., 0]
    return found.masked_fill(failed[..., None] > 0, 0.0)
