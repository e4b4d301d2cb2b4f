"""What a codebook is: how the numbers of one group become codes and fp16 scales, and back."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Codebook:
    """Levels that a group of numbers is rounded to; one file, one line of `CODEBOOKS`.

    The reference defines the meaning; kernels and fast CPU paths are opt-in, see `why_not`.

    Attributes:
        numbers: fp16 numbers stored per group; 0 means no scales, and groups have no effect.
        words: for people, after `K4 V4`; may be empty.
        bits: widths of a code that it supports.
        group: the one size of a group that it supports, along channels only; None for all sizes.
    """

    numbers: int
    words: str
    bits: tuple[int, ...] = (8, 5, 4, 3, 2, 1)
    group: int | None = None

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes (whole numbers) `[..., group]` and scales `[..., numbers]` fp16 of fp32 numbers."""
        raise NotImplementedError

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """Numbers `[..., group]` fp32 of codes and scales in fp32."""
        raise NotImplementedError
