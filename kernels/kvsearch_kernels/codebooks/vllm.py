"""vLLM's KV cache types with a scale per token and head: `int8_`, `int4_` and `fp8_per_token_head`.

Read from vLLM 0.32.0 (`v1/attention/ops/triton_reshape_and_cache_flash.py` and
`int4_per_token_head.py`). Its group is the whole head. Scales are in fp32, which is two words.
Arithmetic is fp32 and rounded after each operation, as in vLLM's forms without a GPU; on one, its
compiler may divide and add less exactly, and the rotation of 4 bits goes through bf16.
"""

from functools import cache
from typing import TYPE_CHECKING

from kvsearch_kernels.butterflies import butterflies
from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.fp8 import Fp8

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST = 1e-6  # scale
SEED = 0x9E3779B9  # of the signs
ZERO_BITS = 15  # of an fp32 scale, that hold the zero point of 4 bits


class VllmInt(Codebook):
    """8 bits symmetric; 4 bits with signs, an unscaled Hadamard rotation and a whole zero point."""

    numbers = 2
    words = "vLLM int"
    bits = (8, 4)
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes of 8 bits are the integers plus 128."""
        import torch

        if bits == 8:
            scale = _scale(groups.abs().amax(-1, keepdim=True), 127)
            codes = _half_away(groups * scale.reciprocal()).clamp_(-128, 127).add_(128)
            return codes, _words(scale)
        y = _rotated(groups * _signs(groups))
        low, high = y.aminmax(dim=-1, keepdim=True)
        scale = _scale(high - low, 15)
        zero = _half_away(-low / scale).clamp_(0, 15)
        codes = _half_away(y * scale.reciprocal() + zero).clamp_(0, 15)
        held = (scale.view(torch.int32) & ~ZERO_BITS) | zero.int()
        return codes, _words(held.view(torch.float32))

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`(code - zero) * scale`, and at 4 bits the inverse rotation."""
        import torch

        held = _fp32(scales)
        if bits == 8:
            return (codes.float() - 128) * held
        zero = (held.view(torch.int32) & ZERO_BITS).float()
        scale = (held.view(torch.int32) & ~ZERO_BITS).view(torch.float32)
        y = (codes.float() - zero) * scale
        return _rotated(y) * _signs(y) / _block(y)


class VllmFp8(Fp8):
    """E4M3 with a scale that takes the largest number to 448."""

    numbers = 2

    def __init__(self) -> None:
        super().__init__("e4m3fn", "vLLM fp8 e4m3")

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes are the bytes of the scaled numbers."""
        scale = _scale(groups.abs().amax(-1, keepdim=True), 448)
        return super().encode(groups * scale.reciprocal(), bits)[0], _words(scale)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """The numbers whose bytes the codes are, times the scale."""
        return super().decode(codes, scales, bits) * _fp32(scales)


def _scale(size: "Tensor", top: int) -> "Tensor":
    """`size / top`, rounded once (on CUDA torch takes the inverse of a Python number)."""
    import torch

    return (size / torch.full_like(size, top)).clamp_min_(LEAST)


def _half_away(x: "Tensor") -> "Tensor":
    """Rounded; halves are added in fp32 and what is left cut off."""
    import torch

    return (x + torch.full_like(x, 0.5).copysign_(x)).trunc_()


def _words(scale: "Tensor") -> "Tensor":
    """The bits of fp32 numbers `[..., 1]` as two words `[..., 2]`."""
    import torch

    return scale.view(torch.float16)


def _fp32(words: "Tensor") -> "Tensor":
    """Inverse of `_words`."""
    import torch

    return words.contiguous().view(torch.float32)


def _block(x: "Tensor") -> int:
    """Channels that the rotation mixes: the largest power of two that divides the group."""
    n = x.shape[-1]
    return n & -n


def _rotated(x: "Tensor") -> "Tensor":
    return butterflies(x.unflatten(-1, (-1, _block(x)))).flatten(-2)


def _signs(x: "Tensor") -> "Tensor":
    """1 or -1 for each channel of a group, the same in every block, `[group]` fp32."""
    return _signs_on(_block(x), x.device).repeat(x.shape[-1] // _block(x))


@cache
def _signs_on(block: int, device: "torch.device") -> "Tensor":
    """As vLLM draws them: with torch's generator of the CPU."""
    import torch

    from kvsearch_kernels.host_to_device import sent

    with torch.inference_mode(False):
        draw = torch.Generator("cpu").manual_seed(SEED)
        halves = torch.full((block,), 0.5, dtype=torch.float32, device="cpu")
        return sent((2 * torch.bernoulli(halves, generator=draw) - 1).numpy(), device)
