"""Noise of a window as it was measured, on the 629 policies that were measured on four windows.

`noise_table.py` compares these constants with the records (`noise.csv`).

A window of 896 scored tokens deviates from a policy's mean loss in two ways. All policies lose more
on some windows than on others (`COMMON`, as a share of the loss). And each policy has noise of its
own, of which near-identical policies share half and others next to nothing; that is what a search
learns by heart. Distances are root mean squares over kvei's features.
"""

import numpy as np

COMMON = 0.19  # standard deviation of a window's factor
BASE, SHARE = 0.004, 0.12  # nats per token, and share of the loss: noise of a policy on a window
NEAR, FAR, REACH = 0.56, 0.07, 0.14  # correlation; the distance at which it falls, as in a Gaussian
WAVES = 256  # of the random field whose covariance that is (random Fourier features)


class Noise:
    """Draws of one text: the same policy on the same window has the same noise.

    Args:
        dims: features of a policy.
        seed: of the text.
    """

    def __init__(self, dims: int, seed: int) -> None:
        self.dims, self.seed = dims, seed

    def loss(self, mean: float, x: np.ndarray, key: int, window: int) -> float:
        """Loss over the full cache on a window, nats per token.

        Args:
            mean: over all windows.
            x: features of the policy.
            key: of the policy.
            window: its number.
        """
        text = np.random.default_rng([self.seed, window])
        factor = max(0.3, 1 + COMMON * text.standard_normal())
        far = text.standard_normal()
        waves = text.standard_normal((WAVES, self.dims)) / (REACH * self.dims**0.5)
        phases, heights = text.uniform(0, 2 * np.pi, WAVES), text.standard_normal(WAVES)
        near = float(np.cos(waves @ x + phases) @ heights) * (2 / WAVES) ** 0.5
        own = np.random.default_rng([self.seed, window, key]).standard_normal()
        shares = (FAR**0.5, (NEAR - FAR) ** 0.5, (1 - NEAR) ** 0.5)
        z = float(np.dot(shares, (far, near, own)))
        return mean * factor + (BASE + SHARE * max(mean, 0.0)) * z
