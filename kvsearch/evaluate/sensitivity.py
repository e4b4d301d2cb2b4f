"""How much each layer suffers from eviction: the measurement behind `spread: sensitivity`.

A few neighbouring layers at a time keep only a small cache while all others keep everything; the
rise in NLL is theirs. Cheap (one short window per group), and measured once per model and text.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluate.quality import Evaluator
from kvsearch.policy import Policy, Score, Spread

GROUPS = 10
SLOTS = 64  # of the starved layers, headroom included
INTERVAL = 16


def measure(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    *,
    groups: int = GROUPS,
    progress: Callable[[int], None] | None = None,
) -> tuple[float, ...]:
    """Harm per layer, mean 1, never below a tenth of the mean.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`, `T` well above `SLOTS`.
        groups: groups of neighbouring layers that are starved together.
        progress: called with the number of tokens done.
    """
    L, T = evaluator.loaded.shape.layers, windows.shape[1]
    full = evaluator.quality(Policy(), windows, resident=False, progress=progress).nll
    harm = np.zeros(L)
    for members in np.array_split(np.arange(L), min(groups, L)):
        slots = np.full(L, float(T + INTERVAL))
        slots[members] = SLOTS
        starved = Policy(
            slots=round(slots.mean()),
            interval=INTERVAL,
            recents=SLOTS // 2,
            score=Score(),
            spread=Spread(kind="sensitivity", exponent=1.0, weights=tuple(slots.tolist())),
        )
        nll = evaluator.quality(starved, windows, resident=False, progress=progress).nll
        harm[members] = float((nll - full)[:, SLOTS:].mean()) / len(members)
    harm = np.maximum(harm, 0.1 * max(harm.mean(), 1e-6))
    harm /= harm.mean()
    return tuple(float(f"{h:.4g}") for h in harm)
