"""NVFP4: E2M1 numbers in blocks of 16 with an E4M3 scale, as vLLM and FlashInfer store a cache.

Read from vLLM's `csrc/libtorch_stable/nvfp4_kv_cache_kernels.cu` with `nvfp4_utils.cuh`, and
`nvfp4_append_quantize_block` of FlashInfer's `page.cuh`. The global scale is 1, which it is there
too where a checkpoint brings none. Reciprocals are rounded to the nearest fp32 number, where a GPU
may take faster ones.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.fp8 import Fp8

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 16
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1
E4M3 = Fp8("e4m3fn", "")


class Nvfp4(Codebook):
    """A group is two blocks of 16, whose two scales share one word, the first in its lower byte."""

    numbers = 1
    words = "NVFP4 in blocks of 16"
    bits = (4,)
    group = 2 * BLOCK
    columns = False

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """The largest number of a block becomes 6; codes are a sign bit and the index of a size."""
        import torch

        g = groups.unflatten(-1, (2, BLOCK))
        most = g.abs().amax(-1)
        sixth = torch.full_like(most, 6.0).reciprocal_()
        held, _ = E4M3.encode(most * sixth, 8)
        scale = E4M3.decode(held, held, 8).unsqueeze(-1)
        x = g * torch.where(scale > 0, scale.reciprocal(), 0.0)
        at = torch.bucketize(x.abs().contiguous(), _tables_on(x.device)[1])
        codes = at + 8 * torch.signbit(x)
        return codes.flatten(-2), held.view(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`size * sign * scale of the block`."""
        import torch

        held = scales.contiguous().view(torch.uint8)  # [..., 2]
        numbers = _tables_on(codes.device)[0][codes.long()].unflatten(-1, (2, BLOCK))
        return (numbers * E4M3.decode(held, held, 8).unsqueeze(-1)).flatten(-2)


@cache
def _tables_on(device: "torch.device") -> "tuple[Tensor, Tensor]":
    """Numbers of the codes, `[16]`, and of each size but the last what still rounds to it, `[7]`.

    Half-way between two sizes the even index is nearer.
    """
    import torch

    from kvsearch_kernels.host_to_device import sent

    sizes = np.array(SIZES, np.float32)
    middles = (sizes[1:] + sizes[:-1]) / 2
    middles[1::2] = np.nextafter(middles[1::2], np.float32(0))
    with torch.inference_mode(False):
        return sent(np.concatenate([sizes, -sizes]), device), sent(middles, device)
