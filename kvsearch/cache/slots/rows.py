"""`repack_kv` for formats without a kernel: its reference, with few launches.

Bytes of what stays in a pool move as they are; what changes pool is brought together, and torch
decodes and encodes that.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Codec, Held, Ran
from kvsearch.cache.slots.pools import as_held, first_of
from kvsearch.rules.pick import pick
from kvsearch_kernels.decode_attention.reference import slots_of
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.repack_kv import NewPool

Sides = tuple[Held, Held]  # of keys and of values


@dataclass(frozen=True)
class _Origin:
    """Where slots that enter a pool are in another part.

    Attributes:
        sides: keys and values of the part, as they are held.
        formats: of either.
        at: for each slot that enters, its row there; of other parts' slots any row.
        here: which of them it has; None of the first part, which all others write over.
    """

    sides: Sides
    formats: tuple[Codec, Codec]
    at: Tensor
    here: Tensor | None


@dataclass(frozen=True)
class _Plan:
    """What a compaction does to one pool.

    Attributes:
        codecs: of keys and of values.
        own: what is in it, None if it was empty.
        index: of its slots after, among its own before and then those that enter; None: no change.
        origins: of those that enter; empty if none do.
    """

    codecs: tuple[Codec, Codec]
    own: Sides | None
    index: Tensor | None
    origins: Sequence[_Origin]

    def direct(self, side: int) -> bool:
        """Whether those that enter can be encoded from where they are, all in 16 bits."""
        if not self.origins:
            return False
        plain = self.origins[0].formats[side].fmt is None
        return len(self.origins) == 1 and plain and self.codecs[side].fmt is not None


def repack(
    ran: Ran, pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> list[Sides | None]:
    """Keys and values of each of the `pools`, as they are held; see `repack_kv.reference`.

    Slots of a pool are in order of time: one that keeps all of its slots, and that none enters, is
    not touched, if the host knows. In place of it there is None.

    Args:
        ran: where to note which implementation of each op ran.
        pools: what to make.
        dtype: type that values have in between.
        native: type of 16 bits.
    """
    plans = [_planned(pool, native) for pool in pools]
    both = [(plan, side) for plan in plans for side in (0, 1)]
    joint = _joint(both)
    fetched = _gathered(ran, [
        ([x], origin.at)
        for i, (plan, side) in enumerate(both)
        if plan.origins and (i in joint or not plan.direct(side))
        for origin in plan.origins for x in origin.sides[side]
    ])  # fmt: skip
    entered: list[Held | None] = []
    waiting: dict[int, Tensor] = {}
    for i, (plan, side) in enumerate(both):
        entered.append(None)
        if i in joint:
            waiting[i] = _values(ran, plan, side, fetched, dtype)
        elif plan.direct(side):
            first = plan.origins[0]
            entered[i] = plan.codecs[side].encode(first.sides[side][0], ran, first.at)
        elif plan.origins:
            entered[i] = plan.codecs[side].encode(_values(ran, plan, side, fetched, dtype), ran)
    for alike in dict.fromkeys(joint.values()):
        mine = {i: x for i, x in waiting.items() if joint[i] == alike}
        for i, held in zip(mine, _encoded(ran, alike[0], [*mine.values()]), strict=True):
            entered[i] = held
    moved = _gathered(ran, [
        ([x] if new is None else [x, new[i]], plan.index)
        for (plan, side), new in zip(both, entered, strict=True)
        if plan.own is not None and plan.index is not None
        for i, x in enumerate(plan.own[side])
    ])  # fmt: skip
    made = (_made(*which, new, moved) for which, new in zip(both, entered, strict=True))
    sides = zip(made, made, strict=True)
    return [None if keys is None or values is None else (keys, values) for keys, values in sides]


def _gathered(ran: Ran, asked: list[tuple[list[Tensor], Tensor]]) -> Iterator[Tensor]:
    """Rows of tensors `[B, H, N, w]` that follow one another, `[B, H, n, w]` each."""
    for parts, source in asked:
        yield gather_kv.record(ran, parts[0] if len(parts) == 1 else torch.cat(parts, 2), source)


def _planned(pool: NewPool, native: torch.dtype) -> _Plan:
    """What is to be done for a pool."""
    source, own, counts = pool.source, pool.own, [slots_of(p) for p in pool.parts]
    codecs = _codecs(pool.formats, native)
    if own is None:
        return _Plan(codecs, None, None, _origins(pool, counts, source, native))
    part, first, size = pool.parts[own], sum(counts[:own]), counts[own]
    sides, index = (as_held(part.keys), as_held(part.values)), source - first if first else source
    others = sum(counts) - size
    if others:
        enters = (index < 0) | (index >= size)
        if most := _most(enters, others):  # heads may differ: some encode in vain
            slots = pick(source, first_of(enters, most))
            index = torch.where(enters, size + enters.cumsum(-1) - 1, index)
            return _Plan(codecs, sides, index, _origins(pool, counts, slots, native))
    return _Plan(codecs, sides, None if size == source.shape[-1] else index, ())


def _codecs(formats: tuple[object, object], native: torch.dtype) -> tuple[Codec, Codec]:
    keys, values = (Codec(fmt, native) for fmt in formats)  # type: ignore[arg-type]
    return keys, values


def _most(enters: Tensor, others: int) -> int:
    """Most slots of any head that enter a pool; an upper bound where counting would wait."""
    if enters.device.type == "cpu":
        return int(enters.sum(-1).max())
    return min(enters.shape[-1], others)


def _origins(
    pool: NewPool, counts: Sequence[int], slots: Tensor, native: torch.dtype
) -> list[_Origin]:
    """Where `slots` that enter a pool are in its other parts."""
    found: list[_Origin] = []
    first = 0
    for i, (part, n) in enumerate(zip(pool.parts, counts, strict=True)):
        if i != pool.own:
            at = slots - first if first else slots
            here = (at >= 0) & (at < n) if found else None
            if slots is not pool.source or len(counts) > 1:
                at = at.clamp(0, n - 1)
            codecs = _codecs((part.key_format, part.value_format), native)
            found.append(_Origin((as_held(part.keys), as_held(part.values)), codecs, at, here))
        first += n
    return found


def _joint(both: Sequence[tuple[_Plan, int]]) -> dict[int, tuple[Codec, int]]:
    """Which sides of pools are encoded with others, since calls cost most of it.

    They have the same format and, in bytes, width: a model may have lost channels of one side.
    """
    found: dict[tuple[Codec, int], list[int]] = {}
    for i, (plan, side) in enumerate(both):
        codec = plan.codecs[side]
        if plan.origins and plan.own is not None and codec.fmt is not None:
            found.setdefault((codec, plan.own[side][0].shape[-1]), []).append(i)
    return {i: alike for alike, mine in found.items() if len(mine) > 1 for i in mine}


def _values(
    ran: Ran, plan: _Plan, side: int, fetched: Iterator[Tensor], dtype: torch.dtype
) -> Tensor:
    """What enters a pool `[B, H, n, D]`."""
    values: Tensor | None = None
    for origin in plan.origins:
        held = tuple(next(fetched) for _ in origin.sides[side])
        x = origin.formats[side].decode(held, dtype, ran)
        if values is not None and origin.here is not None:
            x = torch.where(origin.here.unsqueeze(-1), x, values)
        values = x
    assert values is not None
    return values


def _encoded(ran: Ran, codec: Codec, values: Sequence[Tensor]) -> Iterator[Held]:
    """What is held of each of `values` `[B, H, n, D]`, encoded at once."""
    rows = torch.cat([x.reshape(1, 1, -1, x.shape[3]) for x in values], 2)
    parts = [t.split([x.shape[:3].numel() for x in values], 2) for t in codec.encode(rows, ran)]
    for x, held in zip(values, zip(*parts, strict=True), strict=True):
        yield tuple(t.view(*x.shape[:3], -1) for t in held)


def _made(plan: _Plan, side: int, new: Held | None, moved: Iterator[Tensor]) -> Held | None:
    """A side of a pool after a compaction; None if it is as it was."""
    if plan.own is None:
        return new
    return None if plan.index is None else tuple(next(moved) for _ in plan.own[side])
