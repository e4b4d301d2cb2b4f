"""Stopping a proposal early, when that is already certain on the tokens both have seen.

Windows are independent and no policy sees the future, so the NLL of the first windows, or of a
part of one, is what the whole evaluation has there. Whole windows show a policy as it is. A part of
one is a fair sample only of what comes after both sides have had to forget something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import ModelShape, Policy, layout
from kvsearch.stats import standard_error

SHARES = (0.25, 0.5)  # of the first windows: where a proposal is looked at before it ends them
SURE = 3.0  # standard errors of the paired difference: one-sided, 99.9 %
LEAST = 256  # scored tokens below which no trial is stopped


class Rung(NamedTuple):
    """Where a trial is looked at: after `stop` tokens of each of the first `windows` windows."""

    windows: int
    stop: int


@dataclass(frozen=True)
class Exposure:
    """When a policy starts to forget, in tokens seen.

    Attributes:
        first: the KV head that evicts first does so here; before it nothing was lost but bits.
        mean: where a head starts on average.
    """

    first: float
    mean: float


def exposure(policy: Policy, shape: ModelShape) -> Exposure:
    """Tokens at which eviction starts in the first KV head and on average; infinite if never."""
    first, total, heads = float("inf"), 0.0, 0
    for layer in layout(policy, shape).layers:
        start, many = float("inf"), len(layer.heads)
        if policy.anchors is not None:
            start = 0.0  # at the first anchor, wherever that is
        elif layer.target is not None:
            start = float(layer.clock.after(layer.target) or start)
        first, total, heads = min(first, start), total + many * start, heads + many
    return Exposure(first, total / heads)


def rungs(
    policy: Policy, tokens: int, score_from: int, windows: int = 1, together: int = 1
) -> tuple[Rung, ...]:
    """Where a policy is looked at: parts of the first windows, those, twice as many, and so on.

    A policy that first evicts after a prompt shows nothing on a part of it.

    Args:
        policy: to be looked at.
        tokens: of a window.
        score_from: first scored position.
        windows: of the whole text; they and all of their tokens are the last rung.
        together: windows that go through the model together, and so are the first.
    """
    first = min(together, windows)
    stops = [int(s * tokens) for s in SHARES] if policy.trigger == "stream" else []
    looks = [Rung(first, stop) for stop in stops if first * (stop - score_from) >= LEAST]
    while first < windows:
        looks.append(Rung(first, tokens))
        first *= 2
    return (*looks, Rung(windows, tokens))


@dataclass(frozen=True, eq=False)
class Rival:
    """An opponent: what it is called, its exposure and its NLL `[W, T - 1]` on all windows."""

    name: str
    exposure: Exposure
    nll: NDArray[np.float32]


def verdict(
    nll: NDArray[np.float32],
    mine: Exposure,
    rivals: Sequence[Rival],
    *,
    score_from: int,
    tokens: int,
    sure: float = SURE,
) -> str | None:
    """Why a proposal need not go on, or None.

    Args:
        nll: of the proposal on a prefix `[windows, stop - 1]`.
        mine: its exposure; in a part of a window, tokens before its first eviction do not count.
        rivals: policies that use no more bytes. In a part of a window, those are left out whose
            layers evict on average after its middle: their loss there is too small.
        score_from: first scored position.
        tokens: of a whole window.
        sure: standard errors of the block-wise paired difference that count as certain.
    """
    windows, stop = len(nll), nll.shape[1] + 1
    start, fair = score_from - 1, list(rivals)
    if stop < tokens:
        start = max(score_from, int(min(mine.first, stop))) - 1
        fair = [r for r in rivals if r.exposure.mean <= stop / 2]
    if not fair or nll[:, start:].size < LEAST:
        return None
    best = min(fair, key=lambda r: float(r.nll[:windows, start : stop - 1].mean()))
    behind = nll[:, start:] - best.nll[:windows, start : stop - 1]
    mean, error = float(behind.mean()), standard_error(behind)
    if not mean - sure * error > 0:
        return None
    seen = f"{windows * stop} tokens"
    return f"stopped after {seen}, {mean:.3f} +- {error:.3f} nats behind {best.name}"
