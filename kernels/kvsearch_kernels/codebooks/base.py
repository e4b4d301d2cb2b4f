"""What a codebook is: how the numbers of one group become codes and scales, and back."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Codebook:
    """Levels that a group of numbers is rounded to; one file, one line of `CODEBOOKS`.

    The reference defines the meaning; kernels and fast CPU paths are opt-in, see `why_not`.

    Attributes:
        numbers: 16-bit words stored per group, in a tensor of type fp16: a number each, or the bits
            of scales of another type. 0 means no scales, and groups have no effect.
        words: for people, after `K4 V4`; may be empty.
        bits: widths of a code that it supports.
        group: the one size of a group that it supports, along channels only; None for all sizes.
        columns: whether groups may lie along tokens: each number needs its own code and the scales
            alone, and a group does not change if its first number is repeated in front.
    """

    numbers: int
    words: str
    bits: tuple[int, ...] = (8, 5, 4, 3, 2, 1)
    group: int | None = None
    columns: bool = True

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """Codes (whole numbers) `[..., group]` and words `[..., numbers]` of fp32 numbers."""
        raise NotImplementedError

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """Numbers `[..., group]` fp32 of codes and words."""
        raise NotImplementedError
