"""Races: a proposal that is certainly behind a rival on the windows both have seen is stopped.

Windows are independent and every policy is causal, so the NLL on the first windows equals that of
the whole evaluation there. There are no looks inside a window: the first part of one says little
about policies whose caches fill late, and its blocks vary less than windows do.

A comparison rests on a t quantile over the blocks of the windows seen, and is corrected for the
number of rivals. The constants were chosen on records recentred to equal loss, where six rivals
stop a proposal wrongly in less than 1 % of races (`studies/2026-11-coverage`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.records import Interval
from kvsearch.stats import BLOCK, blocks, standard_error
from kvsearch.student import quantile

FALSE = 0.002  # stops that a look may make wrongly, all rivals together
PARTS = 16  # blocks of a window, of at least `BLOCK` tokens
LEAST = 256  # scored tokens below which no trial is stopped


class Rung(NamedTuple):
    """Where a trial is compared: after `stop` tokens of each of the first `windows` windows."""

    windows: int
    stop: int


def rungs(tokens: int, windows: int = 1, together: int = 1) -> tuple[Rung, ...]:
    """Rungs: the first windows, twice as many, and so on.

    Args:
        tokens: of a window.
        windows: of the whole text, the last rung.
        together: windows that go through the model together, and so are the first.
    """
    first, looks = min(together, windows), []
    while first < windows:
        looks.append(Rung(first, tokens))
        first *= 2
    return (*looks, Rung(windows, tokens))


@dataclass(frozen=True, eq=False)
class Rival:
    """An opponent: its name and its NLL `[W, T - 1]` on all windows."""

    name: str
    nll: NDArray[np.float32]


def behind(
    nll: NDArray[np.float32], rival: NDArray[np.float32], *, score_from: int, false: float
) -> Interval | None:
    """How far a policy is behind another on the windows that it has, if it certainly is.

    Args:
        nll: of the policy on the first windows `[windows, T - 1]`.
        rival: of the other, on as many windows or more.
        score_from: first scored position.
        false: how often a policy that is as good may be called behind.

    Returns:
        The mean difference in nats per token, with the limits by which it was judged.
    """
    less = (nll - rival[: len(nll)])[:, score_from - 1 :]
    block = max(BLOCK, -(-less.shape[1] // PARTS))
    half = quantile(1 - false, blocks(less, block).count - 1) * standard_error(less, block)
    mean = float(less.mean())
    return Interval(mean, mean - half, mean + half) if mean > half else None


def verdict(
    nll: NDArray[np.float32], rivals: Sequence[Rival], *, score_from: int, false: float = FALSE
) -> str | None:
    """Why a proposal can be stopped, or None: the rival that it is most certainly behind.

    Args:
        nll: of the proposal on the first windows `[windows, T - 1]`.
        rivals: policies that use no more bytes, with at least as many windows.
        score_from: first scored position.
        false: share of proposals as good as their rivals that may be stopped.
    """
    windows, mine = len(nll), nll[:, score_from - 1 :]
    if not rivals or mine.size < LEAST:
        return None
    block = max(BLOCK, -(-mine.shape[1] // PARTS))
    sure = quantile(1 - false / len(rivals), blocks(mine, block).count - 1)
    worst, said = sure, None
    for rival in rivals:
        behind = mine - rival.nll[:windows, score_from - 1 :]
        mean, error = float(behind.mean()), standard_error(behind, block)
        if mean > worst * error:
            worst = mean / error if error else float("inf")
            said = f"{mean:.3f} +- {error:.3f} nats behind {rival.name}"
    seen = f"{windows} window{'s' * (windows > 1)} of {nll.shape[1] + 1} tokens"
    return f"stopped after {seen}, {said}" if said else None
