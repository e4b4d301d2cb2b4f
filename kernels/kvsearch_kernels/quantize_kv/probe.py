"""Probe of `quantize_kv`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.reference import Format, Packed, quantize

# head size and format: each width with both kinds of levels, and with and without rotation, which
# mixes all channels or blocks of them
FORMATS = (
    (128, Format(8, 128)),
    (128, Format(4, 64)),
    (128, Format(3, 32)),
    (128, Format(2, 64, rotate=True)),
    (128, Format(1, 128)),
    (64, Format(4, 64, rotate=True)),
    (256, Format(4, 64)),
    (128, Format(8, 64, "lloyd", True)),
    (128, Format(4, 128, "lloyd")),
    (128, Format(3, 64, "lloyd", True)),
    (64, Format(5, 64, "lloyd", True)),
    (64, Format(2, 32, "lloyd", True)),
    (256, Format(1, 256, "lloyd")),
    (128, Format(4, 64, rotate=True, block=32)),
    (64, Format(3, 32, "lloyd", True, block=8)),
)
MOST_WRONG = 0.05  # of the vectors, where a code depends on the rounding of a sum


def steady(fmt: Format) -> bool:
    """Whether codes depend on no rounding in which torch and Triton may differ.

    Sums may be in any order, and the last product of a rotation may be fused with what follows.
    """
    return fmt.levels == "uniform" and fmt.bits > 1 and not fmt.rotate


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every format, a vector of zeros and one of one number."""
    for seed, (D, fmt) in enumerate(FORMATS):
        draw = Draw(device, dtype, seed)
        x = draw.normal(1, 70, 2, D).transpose(1, 2)
        x[0, 0, 3] = 0.0
        x[0, 1, 4] = 1.5
        yield (x, fmt), {}


def differs(got: Packed, x: Tensor, fmt: Format) -> str | None:
    """Why codes and scales are wrong, or None."""
    want = quantize(x, fmt)
    if got.codes.shape != want.codes.shape or got.scales.shape != want.scales.shape:
        return f"shapes are wrong for {fmt}"
    wrong = float((got.codes != want.codes).any(-1).float().mean())
    if wrong > (0 if steady(fmt) else MOST_WRONG):
        return f"{wrong:.0%} of vectors have other codes than the reference, {fmt}"
    if steady(fmt):
        same = torch.equal(got.scales, want.scales)
    else:
        same = torch.allclose(got.scales.float(), want.scales.float(), rtol=2e-3, atol=1e-4)
    return None if same else f"scales differ from those of the reference, {fmt}"
