"""Meaning of `repack_kv`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.decode_attention.reference import Part, slots_of
from kvsearch_kernels.launch import check_slots
from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize, quantize

Held = Tensor | Packed


@dataclass(frozen=True)
class NewPool:
    """A pool that a compaction makes, and what it is made of.

    Attributes:
        source: for each slot of the result, where it is when the parts follow one another, `[n]`
            or per head `[B or 1, H or 1, n]`, int64.
        parts: what its store holds, at most four, none of them empty and none with `lengths`.
        own: which of the parts has the format of the result, and moves; None if none does.
        formats: of keys and values of the result; None is 16 bits.
    """

    source: Tensor
    parts: Sequence[Part]
    own: int | None
    formats: tuple[Format | None, Format | None]


def reference(
    pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> list[tuple[Held, Held]]:
    """Slots of all parts in one format, for each pool of the stores of a layer.

    Codes of slots that are in it already move as they are, because what is rounded a second time
    is not the same. All others are decoded to `dtype` and encoded.

    Args:
        pools: what to make; those of a store share its parts.
        dtype: type that values have in between.
        native: type of the results in 16 bits.

    Returns:
        Keys and values of the slots of each pool.
    """
    return [_pool(pool, dtype, native) for pool in pools]


def _pool(pool: NewPool, dtype: torch.dtype, native: torch.dtype) -> tuple[Held, Held]:
    """`reference` of one pool."""
    counts = [slots_of(p) for p in pool.parts]
    check_slots(pool.source, sum(counts))
    sides = (
        [(p.keys, p.key_format) for p in pool.parts],
        [(p.values, p.value_format) for p in pool.parts],
    )
    keys, values = (
        _side(pool.source, held, counts, pool.own, fmt, dtype, native)
        for held, fmt in zip(sides, pool.formats, strict=True)
    )
    return keys, values


def _side(
    source: Tensor, parts: Sequence[tuple[Held, Format | None]], counts: Sequence[int],
    own: int | None, fmt: Format | None, dtype: torch.dtype, native: torch.dtype,
) -> Held:  # fmt: skip
    """`_pool` of keys, or of values."""
    B, H = _tensor(parts[0][0]).shape[:2]
    at = source.expand(B, H, source.shape[-1])
    moved: Held | None = None
    values: Tensor | None = None
    mine, first = torch.zeros_like(at, dtype=torch.bool).unsqueeze(-1), 0
    for i, ((held, kind), n) in enumerate(zip(parts, counts, strict=True)):
        here = ((at >= first) & (at < first + n)).unsqueeze(-1)
        found = _some(held, (at - first).clamp(0, n - 1))
        first += n
        if i == own:
            moved, mine = found, here
            continue
        read = found if isinstance(found, Tensor) else dequantize(found, _known(kind))
        x = read.to(dtype)
        values = x if values is None else torch.where(here, x, values)
    if values is None:
        assert moved is not None
        return moved
    if fmt is None:
        plain = values.to(native)
        return torch.where(mine, moved, plain) if isinstance(moved, Tensor) else plain
    new = quantize(values, fmt)
    if isinstance(moved, Packed):
        codes = torch.where(mine, moved.codes, new.codes)
        return Packed(codes, torch.where(mine.unsqueeze(-1), moved.scales, new.scales))
    return new


def _tensor(held: Held) -> Tensor:
    return held.codes if isinstance(held, Packed) else held


def _known(fmt: Format | None) -> Format:
    assert fmt is not None
    return fmt


def _some(held: Held, at: Tensor) -> Held:
    """Slots `at` `[B, H, n]`."""
    if isinstance(held, Packed):
        scales = held.scales.flatten(-2)
        some = _rows(scales, at).unflatten(-1, held.scales.shape[-2:])
        return Packed(_rows(held.codes, at), some)
    return _rows(held, at)


def _rows(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(2, at.unsqueeze(-1).expand(*at.shape, x.shape[-1]))
