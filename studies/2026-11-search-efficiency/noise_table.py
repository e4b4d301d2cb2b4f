"""The constants of `noise.py` beside what the records say: `noise.csv`."""

from itertools import pairwise

import numpy as np
from noise import BASE, FAR, NEAR, REACH, SHARE
from simulate import Truth

EDGES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.6)
LOSSES = (0.0, 0.06, 0.1, 0.2, 0.4, 3.0)


def correlations(losses: np.ndarray, x: np.ndarray) -> tuple[list[dict], list[dict]]:
    """What the constants say, and what losses `[policies, windows]` say."""
    mean = losses.mean(1)
    factor = np.exp(np.median(np.log(np.maximum(losses, 0.003) / mean[:, None]), 0))
    left = losses - mean[:, None] * factor / factor.mean()
    left -= left.mean(1, keepdims=True)
    variance = (left**2).sum(1) / (losses.shape[1] - 1)
    spread = []
    for low, high in pairwise(LOSSES):
        some = (mean > low) & (mean <= high)
        found, said = variance[some].mean() ** 0.5, (BASE + SHARE * mean[some]).mean()
        spread.append(
            {
                "what": "standard deviation", "from": low, "to": high, "n": int(some.sum()),
                "measured": f"{found:.4f}", "model": f"{said:.4f}",
            }
        )  # fmt: skip
    z = left / (BASE + SHARE * mean)[:, None]
    both = np.triu_indices(len(z), 1)
    apart = ((x[both[0]] - x[both[1]]) ** 2).mean(1) ** 0.5
    shared = (z[both[0]] * z[both[1]]).sum(1) / (z**2).sum(1).mean()
    alike = []
    for low, high in pairwise(EDGES):
        some = (apart >= low) & (apart < high)
        said = FAR + (NEAR - FAR) * np.exp(-((apart[some] / REACH) ** 2) / 2)
        alike.append(
            {
                "what": "correlation", "from": low, "to": high, "n": int(some.sum()),
                "measured": f"{shared[some].mean():.2f}", "model": f"{said.mean():.2f}",
            }
        )  # fmt: skip
    return spread, alike


def table() -> list[dict]:
    """Measured and modelled noise, from the records."""
    truth = Truth()
    losses, x = truth.windows()
    return [row for rows in correlations(losses, x) for row in rows]
