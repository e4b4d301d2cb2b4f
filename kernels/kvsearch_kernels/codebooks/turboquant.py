"""Keys and values of vLLM's `turboquant_*` KV cache types.

Read from vLLM 0.32.0 (`quantization/turboquant/` and `v1/attention/ops/triton_turboquant_*.py`).
Its groups are whole heads, and its keys are rotated first (`rotate`, with `value_block: 1`).
`turboquant_k8v4` has keys in E4M3 without a scale. Sums are rounded once; in which order vLLM adds,
its GPU decides.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvsearch_kernels.codebooks.base import Codebook

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STEPS, PASSES, TOLERANCE = 200, 200, 1e-10  # of the iteration to the levels
ENDS, FAR = 3.5, 3.0  # it starts within 3.5 sigma, and integrates three times as far
LEAST = 1e-8  # step


class TurboQuantKey(Codebook):
    """Lloyd-Max levels of N(0, 1/d), stretched to length 1 in d dimensions, times the length."""

    numbers = 1
    words = "TurboQuant"
    bits = (4, 3)
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """The length is stored in fp16; a number half-way between two levels gets the upper one."""
        import torch

        levels = levels_on(groups.shape[-1], bits, groups.device)
        length = _length(groups)
        x = groups / (length + 1e-8)
        codes = torch.bucketize(x.contiguous(), (levels[1:] + levels[:-1]) / 2, right=True)
        return codes, length.to(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`level / length of all levels * length`."""
        found = levels_on(codes.shape[-1], bits, codes.device)[codes.long()]
        squares = found.double().square().sum(-1, keepdim=True).float() + 1e-16
        length = squares.double().sqrt().float()  # torch's own fp32 root is not the nearest number
        return scales.float() * (found * length.reciprocal())


class TurboQuantValue(Codebook):
    """Even steps from the smallest number on; codes are chosen before the step is rounded."""

    numbers = 2
    words = "TurboQuant"
    bits = (4, 3)
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Step and minimum are stored in fp16."""
        import torch

        top = 2**bits - 1
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / torch.full_like(low, top)).clamp_min_(LEAST)
        codes = ((groups - low) / step).add_(0.5).trunc_().clamp_(0, top)
        return codes, torch.cat([step, low], -1).to(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`code * step + minimum`."""
        step, low = scales.float().split(1, -1)
        return codes.float() * step + low


def _length(x: "Tensor") -> "Tensor":
    return x.double().square().sum(-1, keepdim=True).sqrt().float()


def levels_on(dim: int, bits: int, device: "torch.device") -> "Tensor":
    """Levels in rising order, `[2**bits]` fp32, kept on a device."""
    import torch

    return _kept(dim, bits, device, torch.is_inference_mode_enabled())


@cache
def _kept(dim: int, bits: int, device: "torch.device", inference: bool) -> "Tensor":
    """Apart for what is made in inference mode, through which no gradient may pass."""
    from kvsearch_kernels.host_to_device import sent

    return sent(levels(dim, bits), device)


@cache
def levels(dim: int, bits: int) -> NDArray[np.float32]:
    """Levels of N(0, 1/dim), `[2**bits]`, as far as vLLM's iteration goes.

    Lloyd's: a level becomes the mean of the density between the middles to its neighbours, by the
    trapezoidal rule. It ends before it has converged, so its limits are part of the definition.
    """
    count, sigma = 2**bits, dim**-0.5
    low, high = -ENDS * sigma, ENDS * sigma
    found = low + (high - low) * (np.arange(count) + 0.5) / count
    weights = np.ones((STEPS + 1, 1))
    weights[[0, -1]] = 0.5
    for _ in range(PASSES):
        edges = np.concatenate([[FAR * low], (found[1:] + found[:-1]) / 2, [FAR * high]])
        width = np.diff(edges) / STEPS
        x = edges[:-1] + np.arange(STEPS + 1)[:, None] * width  # [STEPS + 1, count]
        density = weights * np.exp(-x * x * dim / 2) * (dim / (2 * np.pi)) ** 0.5
        mass = density.sum(0) * width
        mean = (x * density).sum(0) * width / np.maximum(mass, 1e-300)
        new = np.where(mass > 1e-15, mean, found)
        if np.abs(new - found).max() < TOLERANCE:
            break
        found = new
    return found.astype(np.float32)
