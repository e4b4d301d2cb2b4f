"""Block formats of llama.cpp's quantised KV cache: q8_0, q5_0 and q4_0; q5_1 and q4_1.

As in ggml's reference quantisers (`ggml-quants.c`), scales are rounded to fp16 when they are
stored, but codes are chosen with the inverse of the scale in fp32. A block whose scale is so small
that it has no inverse is stored as zeros.
"""

from typing import TYPE_CHECKING

from kvsearch_kernels.codebooks.base import Codebook

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
BELOW_HALF = 0.5 - 2.0**-25  # added and cut off, it rounds halves away from zero in fp32


class GgmlSymmetric(Codebook):
    """One scale a block and no zero: q8_0, q5_0, q4_0."""

    numbers = 1
    words = "ggml _0"
    bits = (8, 5, 4)
    group = BLOCK
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """At 5 and 4 bits the number farthest from zero, the first one, gets the lowest code."""
        import torch

        half = 2 ** (bits - 1)
        size = groups.abs()
        if bits == 8:
            step = _over(size.amax(-1, keepdim=True), half - 1)
            x = groups * _inverse(step)
            codes = (x + torch.full_like(x, BELOW_HALF).copysign_(x)).trunc_().add_(half)
        else:
            step = groups.gather(-1, size.max(dim=-1, keepdim=True).indices) / -half
            codes = (groups * _inverse(step)).add_(half + 0.5).trunc_().clamp_(0, 2 * half - 1)
        return codes, step.to(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`(code - half of the codes) * scale`."""
        return (codes.float() - 2 ** (bits - 1)) * scales.float()


class GgmlMinimum(Codebook):
    """Scale and minimum of a block: q5_1, q4_1."""

    numbers = 2
    words = "ggml _1"
    bits = (5, 4)
    group = BLOCK
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes are counted in fp32 steps from the fp32 minimum."""
        import torch

        top = 2**bits - 1
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = _over(high - low, top)
        codes = ((groups - low) * _inverse(step)).add_(0.5).trunc_().clamp_(0, top)
        return codes, torch.cat([step, low], -1).to(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`code * scale + minimum`."""
        step, low = scales.float().split(1, -1)
        return codes.float() * step + low


def _over(x: "Tensor", whole: int) -> "Tensor":
    """`x / whole`, rounded once: on CUDA, torch takes the inverse of a Python number."""
    import torch

    return x / torch.full_like(x, whole)


def _inverse(step: "Tensor") -> "Tensor":
    """`1 / step`, and 0 where that is infinite."""
    return step.reciprocal().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
