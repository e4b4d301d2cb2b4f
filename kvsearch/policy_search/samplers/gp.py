"""A small exact Gaussian process: Matern-5/2, one length scale per feature, fitted by MAP.

There are hundreds of points at most, so everything is dense, in double precision, and in NumPy: at
these sizes another library spends most of its time in calls, and importing it takes longer than all
fits of a search. The prior of the length scales grows with the square root of the dimension
(Hvarfner et al., arXiv:2402.02229): without it, all points of a high-dimensional cube are far apart
and no observation affects the prediction at another point.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FITTED = 160  # observations that hyper-parameters are fitted to; a step of the fit costs their cube
STEPS = 25  # of BFGS at most; a fit converges in about 15
ENOUGH = 1e-5  # relative decrease by a step below which the fit has converged
HALVINGS = 10  # of a step that does not decrease the value enough
ARMIJO = 1e-4  # least decrease of a step, as a share of the linear prediction
WIDE = 5  # bounds of a parameter: standard deviations of its prior on either side of the mean
LEAST_NOISE = 1e-4  # variance, in units of the data's
# Normal priors of the logarithms (mean, standard deviation). Some twenty were tried on the first
# runs of the benchmark: these predicted other runs about as well as the best, with larger predicted
# variances. Squared errors are still about twice the predicted variance (`predict.csv` in
# studies/2026-11-search-efficiency).
LENGTH, SPREAD = -0.5, 1.0  # of the length scales, beside half the log of the dimension
SCALE = (2.0, 0.5)  # of the variance of the process
NOISE = (-3.0, 1.0)  # of the variance of the noise


@dataclass(frozen=True, eq=False)
class GP:
    """A fitted process in standardised units.

    Attributes:
        x: `[n, D]` features of what was observed.
        y: `[n]` standardised values.
        noise: `[n]` variance of each.
        lengths: `[D]`.
        scale: variance of the process.
        centre, unit: mean and standard deviation of the raw values.
        root: `[n, n]`, see `_root`, of the observations' covariance.
        solved: `[n]`, the covariance's inverse times `y`.
    """

    x: Array
    y: Array
    noise: Array
    lengths: Array
    scale: float
    centre: float
    unit: float
    root: Array
    solved: Array

    def posterior(self, x: Array) -> tuple[Array, Array]:
        """Mean and standard deviation `[C]` of the noiseless function at `x` `[C, D]`."""
        k = self.scale * _matern(_distance(x / self.lengths, self.x / self.lengths))
        mean = k @ self.solved
        half = self.root @ k.T
        variance = np.maximum(self.scale - (half * half).sum(0), 1e-10)
        return mean * self.unit + self.centre, np.sqrt(variance) * self.unit

    def conditioned(self, x: Array) -> "GP":
        """The process conditioned on its own means at `x` `[P, D]`: means stay, variances shrink.

        The values are not data, so no hyper-parameter is fitted to them.
        """
        if not len(x):
            return self
        mean, _ = self.posterior(x)
        sure = np.full(len(x), LEAST_NOISE)  # so that the means stay
        return process(
            np.concatenate([self.x, x]),
            np.concatenate([self.y, (mean - self.centre) / self.unit]),
            np.concatenate([self.noise, sure]),
            self.lengths,
            self.scale,
            self.centre,
            self.unit,
        )


def fit(x: Array, y: Array) -> GP:
    """Fit the hyper-parameters, of many observations to `FITTED` that are evenly spread over them.

    Args:
        x: `[n, D]` features in [0, 1].
        y: `[n]` values.
    """
    dims = x.shape[1]
    centre = float(y.mean())
    unit = max(float(y.std()), 1e-6) if len(y) > 1 else 1.0
    z, each = (y - centre) / unit, np.ones(len(y))
    means = np.array([LENGTH + 0.5 * log(dims)] * dims + [SCALE[0], NOISE[0]])
    spreads = np.array([SPREAD] * dims + [SCALE[1], NOISE[1]])

    def parts(theta: Array) -> tuple[Array, float, Array]:
        return np.exp(theta[:dims]), exp(theta[dims]), (exp(theta[-1]) + LEAST_NOISE) * each

    some = np.linspace(0, len(x) - 1, min(len(x), FITTED)).round().astype(int)

    def loss(theta: Array) -> tuple[float, Array]:
        lengths, scale, noise = parts(theta)
        value, slope = misfit(x[some], z[some], lengths, scale, noise[some])
        away = (theta - means) / spreads
        slope[-1] *= exp(theta[-1])  # from the slope by the variance to that by its logarithm
        return value + 0.5 * float(away @ away), slope + away / spreads

    found = lowest(loss, means, means - WIDE * spreads, means + WIDE * spreads)
    lengths, scale, noise = parts(found)
    return process(x, z, noise, lengths, scale, centre, unit)


def lowest(f: Callable[[Array], tuple[float, Array]], x: Array, low: Array, high: Array) -> Array:
    """Where `f` is low, by BFGS from `x`, kept between `low` and `high`.

    Args:
        f: value and gradient.
        x: start, a few dozen numbers, so that the inverse Hessian is stored in full.
        low: lower bounds. A minimum on a bound may be missed.
        high: upper bounds, likewise.
    """
    value, slope = f(x)
    curve = np.zeros((len(x), len(x)))  # estimate of the inverse Hessian, from the first step on
    for turn in range(STEPS):
        step = -curve @ slope if turn else -slope / max(1.0, float(np.linalg.norm(slope)))
        for _ in range(HALVINGS):
            there = np.clip(x + step, low, high)
            new, new_slope = f(there)
            if new <= value + ARMIJO * float(slope @ (there - x)):
                break
            step = step / 2
        else:
            return x
        moved, turned, gain = there - x, new_slope - slope, value - new
        x, value, slope = there, new, new_slope
        if gain <= ENOUGH * max(1.0, abs(value)):
            return x
        bent = float(moved @ turned)
        if not turn:
            curve = np.eye(len(x)) * abs(bent) / float(turned @ turned)
        if bent > 0:
            along = np.outer(curve @ turned, moved)
            grown = 1 + float(turned @ curve @ turned) / bent
            curve += (grown * np.outer(moved, moved) - along - along.T) / bent
    return x


def misfit(x: Array, z: Array, lengths: Array, scale: float, noise: Array) -> tuple[float, Array]:
    """Negative log likelihood of `z`, and its gradient `[D + 2]`, written out.

    The gradient is along the logarithms of the lengths and of the scale, and along the noise.
    """
    scaled = x / lengths
    r = _distance(scaled, scaled)
    fade = np.exp(-r)
    alike = (1 + r + r * r / 3) * fade
    root = _root(scale * alike + np.diag(noise))
    inverse = root.T @ root
    solved = inverse @ z
    value = 0.5 * float(z @ solved) - float(np.log(root.diagonal()).sum())
    by_matrix = 0.5 * (inverse - np.outer(solved, solved))
    by_scale = scale * float(np.vdot(by_matrix, alike))
    # the correlation's slope along a log length is 5/3 (1 + r) exp(-r) (difference / length)^2
    pull = (5 / 3 * scale) * by_matrix * ((1 + r) * fade)
    by_length = 2 * (scaled * scaled * pull.sum(1)[:, None] - scaled * (pull @ scaled)).sum(0)
    return value, np.array([*by_length, by_scale, by_matrix.trace()])


def process(
    x: Array, y: Array, noise: Array, lengths: Array, scale: float, centre: float, unit: float
) -> GP:
    """The process with these hyper-parameters, see `GP`."""
    scaled = x / lengths
    root = _root(scale * _matern(_distance(scaled, scaled)) + np.diag(noise))
    return GP(x, y, noise, lengths, scale, centre, unit, root, root.T @ (root @ y))


def _matern(r: Array) -> Array:
    """Matern-5/2 correlations at distances `r`."""
    alike: Array = (1 + r + r * r / 3) * np.exp(-r)
    return alike


def _distance(a: Array, b: Array) -> Array:
    """`[A, B]` between points over lengths, in the unit of the correlation: the root of 5 times."""
    square = (a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T
    distance: Array = np.sqrt(5 * np.maximum(square, 0.0))
    return distance


def _root(matrix: Array) -> Array:
    """Lower triangular, with `root.T @ root` the inverse; equal points need jitter."""
    for jitter in (0.0, 1e-8, 1e-6, 1e-4, 1e-2):
        try:
            factor = np.linalg.cholesky(matrix + jitter * np.eye(len(matrix)))
        except np.linalg.LinAlgError:
            continue
        root: Array = np.linalg.inv(factor)
        return root
    raise np.linalg.LinAlgError("not a covariance matrix; are all values finite?")
