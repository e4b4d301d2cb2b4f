"""Meaning of `repack_kv`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.launch import check_slots
from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.picking import first_of, gather
from kvsearch_kernels.quantize_kv import Format, Packed, dequantize_kv, quantize_kv

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
    plans = [_planned(pool) for pool in pools]
    sides = [(i, side) for i in range(len(pools)) for side in (0, 1)]
    entering = [_entering(pools[i], plans[i][0], side, dtype) for i, side in sides]
    new = _encoded([pools[i].formats[side] for i, side in sides], entering, native)
    made = [
        _joined(pools[i], side, plans[i][1], x) for (i, side), x in zip(sides, new, strict=True)
    ]
    return [*zip(made[::2], made[1::2], strict=True)]


def _planned(pool: NewPool) -> tuple[Tensor | None, Tensor]:
    """Slots that enter a pool, None where none do, and where its slots are among its own and those.

    Heads may differ in how many enter: some then encode slots in vain.
    """
    source, own, counts = pool.source, pool.own, [slots_of(p) for p in pool.parts]
    check_slots(source, sum(counts))
    if own is None:
        return source, source
    first, size, others = sum(counts[:own]), counts[own], sum(counts) - counts[own]
    index = source - first if first else source
    if others:
        enters = (index < 0) | (index >= size)
        on_host = enters.device.type == "cpu"  # elsewhere counting would wait
        most = int(enters.sum(-1).max()) if on_host else min(enters.shape[-1], others)
        if most:
            index = torch.where(enters, size + enters.cumsum(-1) - 1, index)
            return source.gather(-1, first_of(enters, most)), index
    return None, index


def _entering(pool: NewPool, slots: Tensor | None, side: int, dtype: torch.dtype) -> Tensor | None:
    """Keys (0) or values (1) `[B, H, n, D]` of slots that enter a pool from its other parts."""
    if slots is None:
        return None
    values: Tensor | None = None
    first = 0
    for i, part in enumerate(pool.parts):
        n, start = slots_of(part), first
        first += n
        if i == pool.own:
            continue
        at = slots - start if start else slots
        index = at if len(pool.parts) == 1 else at.clamp(0, n - 1)
        held, fmt = ((part.keys, part.key_format), (part.values, part.value_format))[side]
        found = _like(held, [gather(x, index) for x in tensors(held)])
        if isinstance(found, Packed):
            assert fmt is not None
            found = dequantize_kv(found, fmt, dtype=dtype)
        x = found.to(dtype)
        if values is not None:
            x = torch.where(((at >= 0) & (at < n)).unsqueeze(-1), x, values)
        values = x
    return values


def _encoded(
    formats: Sequence[Format | None], values: Sequence[Tensor | None], native: torch.dtype
) -> list[Held | None]:
    """What is held of `values` `[B, H, n, D]`; one call for all of a format and width."""
    alike: dict[tuple[Format | None, int], list[int]] = {}
    found: list[Held | None] = [None if x is None else x.to(native) for x in values]
    for i, (fmt, x) in enumerate(zip(formats, values, strict=True)):
        if x is not None and fmt is not None:
            alike.setdefault((fmt, x.shape[-1]), []).append(i)
    for (fmt, _), mine in alike.items():
        assert fmt is not None
        some = [x for i in mine if (x := values[i]) is not None]
        sizes = [x.shape[:3].numel() for x in some]
        packed = quantize_kv(torch.cat([x.reshape(1, 1, -1, x.shape[3]) for x in some], 2), fmt)
        each = zip(packed.codes.split(sizes, 2), packed.scales.split(sizes, 2), strict=True)
        for i, x, (codes, scales) in zip(mine, some, each, strict=True):
            rows = x.shape[:3]
            found[i] = Packed(codes.view(*rows, -1), scales.view(*rows, *scales.shape[3:]))
    return found


def _joined(pool: NewPool, side: int, index: Tensor, new: Held | None) -> Held:
    """Keys (0) or values (1) of a pool, given what enters it."""
    if pool.own is None:
        assert new is not None
        return new
    part = pool.parts[pool.own]
    held = (part.keys, part.values)[side]
    parts = [tensors(held)] if new is None else [tensors(held), tensors(new)]
    return _like(held, [gather(torch.cat(x, 2), index) for x in zip(*parts, strict=True)])


def tensors(held: Held) -> tuple[Tensor, ...]:
    """Tensors `[B, H, N, ...]` with a row for each slot; some formats have no scales."""
    if not isinstance(held, Packed):
        return (held,)
    return (held.codes, held.scales.flatten(-2)) if held.scales.shape[-1] else (held.codes,)


def _like(held: Held, rows: Sequence[Tensor]) -> Held:
    """What `tensors` made these rows of."""
    if not isinstance(held, Packed):
        return rows[0]
    shape = *rows[0].shape[:-1], *held.scales.shape[-2:]
    return Packed(rows[0], rows[1].view(shape) if rows[1:] else held.scales.new_empty(shape))
