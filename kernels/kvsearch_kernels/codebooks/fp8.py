"""8-bit floating point without a scale: E4M3 and E5M2 of OCP's OFP8 specification (2023)."""

from typing import TYPE_CHECKING

from kvsearch_kernels.codebooks.base import Codebook

if TYPE_CHECKING:
    from torch import Tensor


class Fp8(Codebook):
    """The nearest number of the format, ties to even; what lies beyond saturates.

    This is vLLM's `--kv-cache-dtype fp8_e4m3` and `fp8_e5m2` with scales of 1. Infinities saturate
    too, at 448 and 57344; what is not a number stays so.

    Args:
        format: name of torch's type after `float8_`.
        words: for people.
    """

    numbers = 0
    bits = (8,)
    columns = False

    def __init__(self, format: str, words: str) -> None:
        self.format, self.words = format, words

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes are the bytes of the numbers; there are no scales."""
        import torch

        dtype = getattr(torch, f"float8_{self.format}")
        top = torch.finfo(dtype).max
        codes = groups.clamp(-top, top).to(dtype).view(torch.uint8)
        return codes, groups.new_empty((*groups.shape[:-1], 0), dtype=torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """The numbers whose bytes the codes are."""
        import torch

        every = torch.arange(256, dtype=torch.uint8, device=codes.device)
        numbers = every.view(getattr(torch, f"float8_{self.format}")).float()
        return numbers.index_select(0, codes.int().flatten()).view(codes.shape)
