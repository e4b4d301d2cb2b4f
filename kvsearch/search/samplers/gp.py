"""A small exact Gaussian process: Matern-5/2, one length scale per feature, fitted by MAP.

Hundreds of points at most, so everything is dense and in double precision. The prior of the length
scales grows with the square root of the dimension (Hvarfner et al., arXiv:2402.02229): without it,
points of a cube with many sides are all far apart and the model learns nothing.
"""

from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

STEPS = 25  # L-BFGS iterations; the fit is done after about 15
LEAST_NOISE = 1e-4  # variance, in units of the data's
# Normal priors of the logarithms: of some twenty tried on the first runs of the benchmark, these
# were about as near to what other runs found as any, and less sure of themselves. Squared
# errors are still about twice what is claimed (`predict.csv`, studies/2026-11-search-efficiency).
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
    """

    x: Tensor
    y: Tensor
    noise: Tensor
    lengths: Tensor
    scale: Tensor
    centre: float
    unit: float
    factor: Tensor
    solved: Tensor

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation `[C]` of the noiseless function at `x` `[C, D]`."""
        k = self.scale * _matern(x, self.x, self.lengths)
        mean = k @ self.solved
        half = torch.linalg.solve_triangular(self.factor, k.T, upper=False)
        variance = (self.scale - (half * half).sum(0)).clamp_min(1e-10)
        return mean * self.unit + self.centre, variance.sqrt() * self.unit

    def conditioned(self, x: Tensor) -> "GP":
        """The process once `x` `[P, D]` have come out as expected: means stay, doubt shrinks.

        The values are not data, so nothing is fitted on them.
        """
        if not len(x):
            return self
        mean, _ = self.posterior(x)
        sure = torch.full((len(x),), LEAST_NOISE, dtype=x.dtype)  # so that they are left alone
        return _made(
            torch.cat([self.x, x]),
            torch.cat([self.y, (mean - self.centre) / self.unit]),
            torch.cat([self.noise, sure]),
            self.lengths,
            self.scale,
            self.centre,
            self.unit,
        )


def fit(x: Tensor, y: Tensor, extra: Tensor) -> GP:
    """Fit the hyper-parameters.

    Args:
        x: `[n, D]` features in [0, 1].
        y: `[n]` values.
        extra: `[n]` known variance of each value beside the fitted noise, in units of y squared.
    """
    dims = x.shape[1]
    sure = extra == 0
    base = y[sure] if sure.any() else y
    centre = float(base.mean())
    unit = float(base.std(unbiased=False).clamp_min(1e-6)) if len(base) > 1 else 1.0
    z, known = (y - centre) / unit, extra / unit**2
    middle = LENGTH + 0.5 * log(dims)
    start = torch.tensor([middle] * dims + [SCALE[0], NOISE[0]], dtype=torch.float64)
    means, spreads = start.clone(), torch.tensor([SPREAD] * dims + [SCALE[1], NOISE[1]])
    theta = start.clone()

    def parts() -> tuple[Tensor, Tensor, Tensor]:
        free = theta.clamp(means - 5 * spreads, means + 5 * spreads)
        return free[:dims].exp(), free[dims].exp(), known + free[dims + 1].exp() + LEAST_NOISE

    optimizer = torch.optim.LBFGS(
        [theta],
        max_iter=STEPS,
        max_eval=2 * STEPS,
        history_size=10,
        tolerance_change=1e-4,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        value, slope = misfit(x, z, *parts())
        away = (theta - means) / spreads
        inside = away.abs() <= 5
        slope[-1] *= float(theta[-1].exp())  # so far of the variance, not of its logarithm
        theta.grad = torch.where(inside, slope, 0.0) + away / spreads
        return value + 0.5 * float((away * away).sum())

    optimizer.step(closure)
    if not bool(torch.isfinite(theta).all()):
        theta.copy_(start)
    lengths, scale, noise = parts()
    return _made(x, z, noise, lengths, scale, centre, unit)


def misfit(
    x: Tensor, z: Tensor, lengths: Tensor, scale: Tensor, noise: Tensor
) -> tuple[float, Tensor]:
    """Negative log likelihood of `z`, and its gradient `[D + 2]`, written out.

    The gradient is along the logarithms of the lengths and of the scale, and along the noise.
    Automatic differentiation gives the same and takes twice as long.
    """
    r = _distance(x, x, lengths)
    fade = (-r).exp()
    alike = (1 + r + r * r / 3) * fade
    factor = _cholesky(scale * alike + noise.diag())
    solved = torch.cholesky_solve(z[:, None], factor)
    value = 0.5 * float(z @ solved[:, 0]) + float(factor.diagonal().log().sum())
    by_matrix = 0.5 * (torch.cholesky_inverse(factor) - solved @ solved.T)
    by_scale = scale * (by_matrix * alike).sum()
    # the correlation's slope along a log length is 5/3 (1 + r) exp(-r) (difference / length)^2
    pull = scale * by_matrix * (5 / 3 * (1 + r) * fade)
    scaled = x / lengths
    by_length = 2 * ((scaled * scaled * pull.sum(1)[:, None]) - scaled * (pull @ scaled)).sum(0)
    return value, torch.cat([by_length, by_scale[None], by_matrix.trace()[None]])


def _made(
    x: Tensor, y: Tensor, noise: Tensor, lengths: Tensor, scale: Tensor, centre: float, unit: float
) -> GP:
    factor = _cholesky(scale * _matern(x, x, lengths) + noise.diag())
    solved = torch.cholesky_solve(y[:, None], factor)[:, 0]
    return GP(x, y, noise, lengths, scale, centre, unit, factor, solved)


def _matern(a: Tensor, b: Tensor, lengths: Tensor) -> Tensor:
    """Matern-5/2 correlations `[A, B]`."""
    r = _distance(a, b, lengths)
    return (1 + r + r * r / 3) * (-r).exp()


def _distance(a: Tensor, b: Tensor, lengths: Tensor) -> Tensor:
    """`[A, B]`, in the unit of the correlation: the root of 5 times squares over lengths."""
    a, b = a / lengths, b / lengths
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T
    return (5 * square.clamp_min(0.0)).sqrt()


def _cholesky(matrix: Tensor) -> Tensor:
    """Lower factor; twins in the data need a little more on the diagonal."""
    jitter = 0.0
    for jitter in (0.0, 1e-8, 1e-6, 1e-4):
        eye = jitter * torch.eye(len(matrix), dtype=matrix.dtype)
        factor, failed = torch.linalg.cholesky_ex(matrix + eye)
        if not int(failed):
            return factor
    return torch.linalg.cholesky(matrix + 1e-2 * torch.eye(len(matrix), dtype=matrix.dtype))
