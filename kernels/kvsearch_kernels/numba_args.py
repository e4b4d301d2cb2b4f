"""What the CPU loops are told about tensors: rows of integers. Imports no numba.

A loop gets addresses, so an implementation must have refused (`why_not_memory`) what has none, and
must hold its tensors until the loop returns.
"""

import math
from functools import cache, lru_cache
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.quantize_kv.reference import Format, Packed, rotation_block

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
PACKED = 4
LEVELS = ("uniform", "lloyd", "e4m3", "e5m2", "ggml-0", "ggml-1")  # level x scale + zero

Integers = NDArray[np.int64]


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def why_not_memory(*tensors: Tensor) -> str | None:
    """Reason why a loop cannot read these tensors where they are."""
    if not _has_numba():
        return "numba is not installed"
    for x in tensors:
        if not x.is_cpu:
            return f"runs on cpu, got {x.device}"
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"a {type(x).__name__} may have no memory of its own"
        if x.requires_grad and torch.is_grad_enabled():
            return "there is no backward pass and a tensor requires a gradient"
        if x.dim() and x.stride(-1) != 1 and x.shape[-1] != 1:
            return f"the last axis must be contiguous, got strides {x.stride()}"
    return None


def why_not_packed(held: Packed, fmt: Format) -> str | None:
    """Reason why packed vectors of this format cannot be read, or None."""
    codes, scales = held.codes, held.scales
    if reason := why_not_memory(codes, scales):
        return reason
    if codes.dtype is not torch.uint8 or codes.dim() != 4:
        return f"codes must be uint8 with 4 axes, got {tuple(codes.shape)} {codes.dtype}"
    if fmt.levels not in LEVELS:
        return f"there is no loop for levels {fmt.levels!r}"
    n, width = codes.shape[2], codes.shape[3] * 8 // fmt.bits
    groups = (n, width // fmt.group)
    if fmt.along == "tokens":
        groups = (-(-(held.lead + n) // fmt.group), width)
    wanted = (*codes.shape[:2], *groups, fmt.numbers)
    if scales.dtype is not torch.float16 or scales.shape != wanted:
        got = f"{tuple(scales.shape)} {scales.dtype}"
        return f"scales of these codes must be float16 {wanted}, got {got}"
    return None


def side(held: Tensor | Packed, fmt: Format | None) -> tuple[int, ...]:
    """The integers of keys or values `[B, H, N, D]`, in the order of `numba_loops.rows`."""
    if isinstance(held, Tensor):
        b, h, n, _ = held.stride()
        e = held.element_size()
        where = (held.data_ptr(), b * e, h * e, n * e, 0, 0, 0, 0, 0, 0)
        return (*where, KINDS[held.dtype], held.shape[3], *[0] * 9)
    assert fmt is not None
    codes, scales = held.codes, held.scales
    at = (codes.data_ptr(), *codes.stride()[:3], scales.data_ptr(), *scales.stride()[:4], held.lead)
    return at + constants(fmt, codes.shape[3] * 8 // fmt.bits)


def row_of(held: Tensor | Packed, fmt: Format | None) -> Integers:
    """`side` as an array."""
    return np.array(side(held, fmt), dtype=np.int64)


def slots_at(slots: Tensor | None, batch: int, heads: int) -> tuple[tuple[int, ...], Tensor | None]:
    """Address and strides of slots, in numbers, and the tensor that must live as long."""
    if slots is None:
        return (0, 0, 0, 0), None
    whole = slots.long().expand(batch, heads, slots.shape[-1])
    return (whole.data_ptr(), *whole.stride()), whole


_tables: list[Tensor] = []  # whose addresses `constants` has given out


@lru_cache(maxsize=1024)
def constants(fmt: Format, width: int) -> tuple[int, ...]:
    """Integers from the kind on, which follow from the format alone."""
    first, table = levels(fmt.levels, fmt.bits)
    block = rotation_block(width, fmt.block) if fmt.rotate else 0
    along = fmt.group if fmt.along == "tokens" else 0
    group = 1 if along else fmt.group  # channels that share a scale
    piece = math.gcd(group, width * fmt.bits // 8)
    return (
        PACKED, width, fmt.bits, group, fmt.numbers, int(table == 0), first, table, block, along,
        piece,
    )  # fmt: skip


@cache
def levels(name: str, bits: int) -> tuple[int, int]:
    """What codes stand for: the first level if all are one apart, or the address of a table."""
    book = CODEBOOKS[name]
    codes = torch.arange(2**bits, dtype=torch.uint8, device="cpu")
    scales = torch.tensor([[1.0, 0.0][: book.numbers]], dtype=torch.float32, device="cpu")
    found = book.decode(codes[None], scales, bits)[0].float()
    if torch.equal(found, found[0] + torch.arange(2**bits, device="cpu")):
        return int(found[0]), 0
    _tables.append(torch.nn.functional.pad(found, (0, 256 - len(found))))
    return 0, _tables[-1].data_ptr()
