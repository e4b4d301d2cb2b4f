"""Stopping a proposal early, when that is already certain on the tokens both have seen.

No policy sees the future, so the NLL of a prefix is the NLL of the whole there: a prefix is a fair
sample, once both sides have had to forget something.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import ModelShape, Policy, layout
from kvsearch.stats import standard_error

SHARES = (0.25, 0.5)  # of every window: where a proposal is looked at
SURE = 3.0  # standard errors of the paired difference: one-sided, 99.9 %
LEAST = 256  # tokens below which nobody is judged


@dataclass(frozen=True)
class Exposure:
    """When a policy starts to forget, in tokens seen.

    Attributes:
        first: the layer that evicts first does so here; before it nothing was lost but bits.
        mean: where a layer starts on average.
    """

    first: float
    mean: float


def exposure(policy: Policy, shape: ModelShape) -> Exposure:
    """Tokens at which eviction starts in the first layer and on average; infinite if never."""
    starts = []
    for layer in layout(policy, shape).layers:
        if layer.target is None:
            starts.append(float("inf"))
        else:
            starts.append(float(layer.next_tick(layer.target) or float("inf")))
    return Exposure(min(starts), sum(starts) / len(starts))


def rungs(policy: Policy, tokens: int, score_from: int) -> tuple[int, ...]:
    """Tokens of a window at which a policy is looked at, the last is all of them.

    A policy that waits for the end of a prompt cannot be judged on a part of it.
    """
    if policy.trigger != "stream":
        return (tokens,)
    looks = [int(s * tokens) for s in SHARES if int(s * tokens) >= score_from + LEAST]
    return (*looks, tokens)


@dataclass(frozen=True, eq=False)
class Rival:
    """An opponent: what it is called, its exposure and its NLL `[W, T - 1]`."""

    name: str
    exposure: Exposure
    nll: NDArray[np.float32]


def verdict(
    nll: NDArray[np.float32],
    mine: Exposure,
    rivals: Sequence[Rival],
    *,
    score_from: int,
    sure: float = SURE,
) -> str | None:
    """Why a proposal need not go on, or None.

    Args:
        nll: of the proposal on a prefix `[W, stop - 1]`.
        mine: its exposure; tokens before its first eviction do not count.
        rivals: policies that use no more bytes. One whose layers do not evict well inside the
            prefix, on average by half of it, looks better than it is and stops nobody.
        score_from: first scored position.
        sure: standard errors of the block-wise paired difference that count as certain.
    """
    stop = nll.shape[1] + 1
    start = max(score_from, int(min(mine.first, stop))) - 1
    if stop - 1 - start < LEAST:
        return None
    fair = [r for r in rivals if r.exposure.mean <= stop / 2]
    if not fair:
        return None
    best = min(fair, key=lambda r: float(r.nll[:, start : stop - 1].mean()))
    behind = nll[:, start:] - best.nll[:, start : stop - 1]
    mean, error = float(behind.mean()), standard_error(behind)
    if not mean - sure * error > 0:
        return None
    return f"stopped after {stop} tokens, {mean:.3f} +- {error:.3f} nats behind {best.name}"
