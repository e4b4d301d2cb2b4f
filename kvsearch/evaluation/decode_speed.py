"""A model of the decode time, so that a search has speeds without timing every policy.

A decode step costs a fixed part (weights, launches) and parts that grow with what the cache holds:
16-bit values read, low-bit values unpacked, values moved at a compaction, and slots ranked.
These amounts are exact, from the layout; what one of each costs is fitted to a few measured
policies on the device at hand. A model of five numbers is an approximation: the report measures
the front and prints both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import ModelShape, Policy, layout

PARTS = ("fixed", "read", "unpack", "move", "score")


def work(policy: Policy, shape: ModelShape, context: int) -> tuple[float, ...]:
    """What one decoded token costs at `context` tokens, by `PARTS`, per sequence.

    Values are single numbers of a key or value, over all layers and KV heads, averaged over one
    interval; the fixed part is 1.
    """
    read = unpack = move = score = 0.0
    for layer in layout(policy, shape).layers:
        p, c = layer.policy, policy.interval
        if not layer.key_dim:
            continue
        heads = layer.shape.kv_heads
        vector = heads * (layer.key_dim + layer.value_dim)
        most = context if layer.target is None else min(context, layer.target)
        residual = (c - 1) / 2 + 1 if policy.compacts else 0.0
        native = min(most, p.fp16_sinks + p.fp16_recent)
        read += (residual + native) * vector
        for tier, count in zip(p.tiers, layer.tier_counts(most), strict=True):
            parts = ((tier.key_bits, layer.key_dim), (tier.value_bits, layer.value_dim))
            for bits, width in parts:
                if bits == 16:
                    read += count * heads * width
                else:
                    unpack += count * heads * width
        if policy.compacts:
            move += most * vector / c
        if p.scored:
            score += (most + residual) * layer.shape.heads
    return (1.0, read, unpack, move, score)


@dataclass(frozen=True)
class SpeedModel:
    """Seconds per unit of `work`, fitted on one device at one context.

    Attributes:
        seconds: per part.
        context: tokens in the cache.
        shape: of the model.
        error: median relative error of the seconds over the policies it was fitted to.
        probes: how many those were.
    """

    seconds: tuple[float, ...]
    context: int
    shape: ModelShape
    error: float
    probes: int

    def step(self, policy: Policy) -> float:
        """Modelled seconds of one decoded token of one sequence."""
        parts = work(policy, self.shape, self.context)
        return sum(s * w for s, w in zip(self.seconds, parts, strict=True))

    def ratio(self, policy: Policy) -> float:
        """Modelled tokens/s of a policy over those of the full cache; above 1 is faster."""
        return self.step(Policy()) / self.step(policy)


def fit(
    policies: Sequence[Policy],
    measure: Callable[[Policy], tuple[float, float]],
    shape: ModelShape,
    context: int,
) -> SpeedModel:
    """Fit the model to measured policies.

    Args:
        policies: different kinds of policies, so that the parts can be separated.
        measure: seconds per token of a policy and of the full cache in the same pairs.
        shape: of the model.
        context: tokens in the cache while measuring.
    """
    rows, times = [], []
    for policy in policies:
        mine, full = measure(policy)
        rows += [work(policy, shape, context), work(Policy(), shape, context)]
        times += [mine, full]
    x, y = np.asarray(rows), np.asarray(times)
    seconds = _nonnegative(x / y[:, None], np.ones(len(y)))  # relative errors count
    off = np.abs(x @ seconds / y - 1)
    return SpeedModel(
        tuple(float(s) for s in seconds), context, shape, float(np.median(off)), len(policies)
    )


def _nonnegative(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative coefficients: a part that would be negative costs nothing."""
    active = [i for i in range(x.shape[1]) if x[:, i].any()]
    while True:
        scale = np.abs(x[:, active]).max(0)
        found = np.linalg.lstsq(x[:, active] / scale, y, rcond=None)[0] / scale
        if (found >= 0).all() or len(active) == 1:
            break
        active.pop(int(np.argmin(found * scale)))
    out = np.zeros(x.shape[1])
    out[active] = np.maximum(found, 0.0)
    return out
