"""Races: a proposal is stopped early if it is clearly behind a rival on the tokens both have seen.

Windows are independent and every policy is causal, so the NLL on the first windows, or on the first
part of one, equals that of the whole evaluation there. Whole windows are a fair comparison. A part
of a window is one only on tokens after which both policies have evicted something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import ModelShape, Policy, layout
from kvsearch.stats import standard_error

SHARES = (0.25, 0.5)  # of the first windows: rungs inside them
SURE = 3.0  # standard errors of the paired difference; one-sided 99.9 % of a normal distribution
LEAST = 256  # scored tokens below which no trial is stopped


class Rung(NamedTuple):
    """Where a trial is compared: after `stop` tokens of each of the first `windows` windows."""

    windows: int
    stop: int


@dataclass(frozen=True)
class Exposure:
    """When a policy starts to evict, in tokens seen.

    Attributes:
        first: first eviction in any KV head; before it only quantisation loses something.
        mean: first eviction of a head, mean over heads.
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
    """Rungs of a policy: parts of the first windows, all of them, twice as many, and so on.

    A policy that first evicts after a prompt has no loss on a part of the prompt.

    Args:
        policy: the proposal.
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
    """An opponent: its name, its exposure and its NLL `[W, T - 1]` on all windows."""

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
    """Why a proposal can be stopped, or None.

    Args:
        nll: of the proposal on a prefix `[windows, stop - 1]`.
        mine: its exposure; in a part of a window, tokens before its first eviction do not count.
        rivals: policies that use no more bytes. In a part of a window, those are left out whose
            layers evict on average after its middle: their loss there is too small.
        score_from: first scored position.
        tokens: of a whole window.
        sure: standard errors of the block-wise paired difference that stop a proposal.
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
