"""Poisoned memory, the error rule, and a token that follows parts, which tests of kernels share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from kvsearch_kernels.budget import over_budget
from kvsearch_kernels.decode_step import Heads, Stores
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Packed

BAND = 256  # elements around every tensor
INT_POISON = 120  # fits every integer type; as a token index or code it is wrong enough to show


def _fill(kind: torch.dtype) -> float:
    return float("nan") if kind.is_floating_point else INT_POISON


def arena(x: Tensor) -> Tensor:
    """A copy of `x` between two bands of NaN, so that a read outside shows in the result."""
    room = torch.full((x.numel() + 2 * BAND,), _fill(x.dtype), dtype=x.dtype)
    inner = room[BAND : BAND + x.numel()].view(x.shape)
    return inner.copy_(x)


def asked(
    q: Tensor, parts: Sequence[Part], dtype: torch.dtype, room: int = 1
) -> tuple[Tensor, Tensor, Tensor, Stores]:
    """Arguments of `decode_step`: a token comes to heads that hold `parts` and an empty pool."""
    keys, values = parts[0].keys, parts[0].values
    B, H = (keys.codes if isinstance(keys, Packed) else keys).shape[:2]
    wide = values.shape[-1] if isinstance(values, Tensor) else values.codes.shape[-1] * 8
    if (fmt := parts[0].value_format) is not None:
        wide //= fmt.bits
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(B, H, 1, n, generator=draw).to(dtype) for n in (q.shape[-1], wide))
    pools = (arena(torch.zeros(B, H, room, x.shape[-1], dtype=dtype)) for x in (k, v))
    pool = Part(*pools, lengths=torch.zeros(B, H, dtype=torch.int32))
    return q, k, v, Stores([Heads([*parts, pool])])


@contextmanager
def poisoned() -> Iterator[None]:
    """Make `torch.empty` return NaN between bands, and check the bands afterwards."""
    rooms: list[Tensor] = []
    real = torch.empty

    def empty(*size: object, dtype: torch.dtype | None = None, **rest: object) -> Tensor:
        like = real(*size, dtype=dtype, device="meta")
        shape = like.shape
        room = torch.full((shape.numel() + 2 * BAND,), _fill(like.dtype), dtype=like.dtype)
        rooms.append(room)
        return room[BAND : BAND + shape.numel()].view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    for room in rooms:
        for band in (room[:BAND], room[-BAND:]):
            assert (band.isnan() if band.is_floating_point() else band == INT_POISON).all()


def close(kernel: Tensor, eager: Tensor, exact: Tensor, room: float = 0.0) -> None:
    """Assert that the error to fp64 is at most twice that of the eager run, plus one rounding.

    `room` is the error that the kernel's own inputs carry, where they differ from the exact ones.
    """
    reason = over_budget("result", kernel, eager, exact, room=room)
    assert reason is None, reason
