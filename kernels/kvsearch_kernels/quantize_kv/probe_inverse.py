"""Probe of `dequantize_kv`."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.probe import FORMATS
from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize_slots, quantize


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every format, and a number of tokens that fills no block; `dtype` is that of the result."""
    if dtype is torch.uint8:  # the type of the codes: the call gave no dtype
        dtype = torch.float32
    for seed, (D, fmt) in enumerate(FORMATS):
        x = Draw(device, dtype, seed).normal(1, 2, 35, D, dtype=torch.float32)
        yield (quantize(x, fmt), fmt), {"dtype": dtype}


def differs(got: Tensor, packed: Packed, fmt: Format, *, dtype: torch.dtype) -> str | None:
    """Why values are wrong, or None."""
    want = dequantize_slots(packed, fmt, dtype=dtype)
    if got.dtype is not dtype:
        return f"values are {got.dtype} instead of {dtype}"
    if fmt.levels == "lloyd" and fmt.rotate:  # level x scale may be fused with the first sum
        exact = dequantize_slots(packed, fmt).double()
        return over_budget(f"{fmt}", got, want, exact, slack=HARDWARE)
    return None if torch.equal(got, want) else f"values differ from those of the reference, {fmt}"
