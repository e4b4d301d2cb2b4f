"""Even steps between the smallest and the largest number of a group; scale and zero."""

from typing import TYPE_CHECKING

from kvsearch_kernels.codebooks.base import Codebook

if TYPE_CHECKING:
    from torch import Tensor


class Uniform(Codebook):
    """Min/max steps; at 1 bit the mean plus or minus the mean deviation."""

    numbers = 2
    words = ""

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Scales are step and zero, rounded to fp16 before codes are chosen."""
        import torch

        g = groups
        if bits == 1:
            mean = g.mean(-1, keepdim=True)
            deviation = (g - mean).abs().mean(-1, keepdim=True)
            return g > mean, torch.cat([2 * deviation, mean - deviation], -1).to(torch.float16)
        low, high = g.aminmax(dim=-1, keepdim=True)
        top = 2**bits - 1
        scales = torch.cat([(high - low) / top, low], -1).to(torch.float16)
        step, zero = scales[..., :1].float(), scales[..., 1:].float()
        return ((g - zero) / step.clamp_min(1e-8)).round_().clamp_(0, top), scales

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`code * step + zero`."""
        step, zero = scales.float().split(1, -1)
        return codes.float() * step + zero
