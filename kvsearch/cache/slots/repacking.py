"""How packed slots get to other pools: bytes of what stays in a pool move, the rest is encoded.

`repack_kv` does it in one launch for the formats that its kernel has. For all others `repack` does
the same with few calls: what enters pools of one format is encoded at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Codec, Held, Ran, as_held
from kvsearch.cache.slots.store import first_of, gather
from kvsearch.rules.pick import pick
from kvsearch_kernels.decode_attention.reference import slots_of
from kvsearch_kernels.repack_kv import NewPool, repack_kv

Sides = tuple[Held | None, Held | None]  # of keys and of values


def repack_together(
    ran: Ran, asked: Sequence[Sequence[NewPool | None]], *, dtype: torch.dtype, native: torch.dtype
) -> list[list[Sides | None]]:
    """Keys and values of the pools of each store of a layer.

    Args:
        ran: where to note which implementation of each op ran.
        asked: pools to make of each store, None of those that are to be empty.
        dtype: type that values have in between.
        native: type of 16 bits.

    Returns:
        In place of a pool that is as it was there is None.
    """
    types = {"dtype": dtype, "native": native}
    found: list[list[Sides | None]] = [[(None, None)] * len(pools) for pools in asked]
    kernel, rest = list[tuple[int, int, NewPool]](), list[tuple[int, int, NewPool]]()
    for s, pools in enumerate(asked):
        here = [(s, i, pool) for i, pool in enumerate(pools) if pool is not None]
        takes = bool(here) and repack_kv.pick([x for *_, x in here], **types) == "triton"
        (kernel if takes else rest).extend(here)
    how: Callable[..., Sequence[Sides | None]]
    for some, how in ((kernel, _by_kernel), (rest, repack)):
        if some:
            made = how(ran, [pool for *_, pool in some], **types)
            for (s, i, _), sides in zip(some, made, strict=True):
                found[s][i] = sides
    return found


def _by_kernel(
    ran: Ran, pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> Sequence[Sides | None]:
    """`repack_kv`, and its results as they are held."""
    made = repack_kv.record(ran, pools, dtype=dtype, native=native)
    return [(as_held(keys), as_held(values)) for keys, values in made]


def repack(
    ran: Ran, pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> list[Sides | None]:
    """As `repack_kv.reference`; None of a pool that keeps all of its slots and that none enters.

    Slots of a pool are in order of time. Arguments are as in `repack_together`.
    """
    plans = [(pool, *_planned(pool)) for pool in pools]
    sides = [(i, side, Codec(pool.formats[side], native)) for i, (pool, *_) in enumerate(plans)
             for side in (0, 1)]  # fmt: skip
    values = [_entering(ran, *plans[i][:2], side, dtype) for i, side, _ in sides]
    made: list[Held | None] = []
    encoded = _encoded(ran, [codec for *_, codec in sides], values)
    for (i, side, _), new in zip(sides, encoded, strict=True):
        pool, _, index = plans[i]
        if pool.own is None or index is None:
            made.append(new)
            continue
        parts = _held(pool, pool.own, side)
        every = zip(parts) if new is None else zip(parts, new, strict=True)
        made.append(tuple(gather(torch.cat(x, 2) if new else x[0], index) for x in every))
    both = zip(made[::2], made[1::2], strict=True)
    return [None if k is None or v is None else (k, v) for k, v in both]


def _planned(pool: NewPool) -> tuple[Tensor | None, Tensor | None]:
    """Slots that enter a pool, and where its slots are among its own and then those.

    None where none enter, and where nothing changes.
    """
    source, own, counts = pool.source, pool.own, [slots_of(p) for p in pool.parts]
    if own is None:
        return source, None
    first, size, others = sum(counts[:own]), counts[own], sum(counts) - counts[own]
    index = source - first if first else source
    if others:
        enters = (index < 0) | (index >= size)
        on_host = enters.device.type == "cpu"  # elsewhere counting would wait
        most = int(enters.sum(-1).max()) if on_host else min(enters.shape[-1], others)
        if most:  # heads may differ: some encode in vain
            index = torch.where(enters, size + enters.cumsum(-1) - 1, index)
            return pick(source, first_of(enters, most)), index
    return None, None if size == source.shape[-1] else index


def _held(pool: NewPool, part: int, side: int) -> Held:
    """Keys (0) or values (1) of a part."""
    found = pool.parts[part]
    return as_held((found.keys, found.values)[side])


def _entering(
    ran: Ran, pool: NewPool, slots: Tensor | None, side: int, dtype: torch.dtype
) -> Tensor | None:
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
        held = tuple(gather(x, index) for x in _held(pool, i, side))
        fmt = (part.key_format, part.value_format)[side]
        x = Codec(fmt, dtype).decode(held, dtype, ran)
        if values is not None:
            x = torch.where(((at >= 0) & (at < n)).unsqueeze(-1), x, values)
        values = x
    return values


def _encoded(
    ran: Ran, codecs: Sequence[Codec], values: Sequence[Tensor | None]
) -> list[Held | None]:
    """What is held of `values` `[B, H, n, D]`; one call for all of a format and width."""
    alike: dict[tuple[Codec, int], list[int]] = {}
    found: list[Held | None] = [None] * len(values)
    for i, (codec, x) in enumerate(zip(codecs, values, strict=True)):
        if x is not None:
            alike.setdefault((codec, x.shape[-1]), []).append(i)
    for (codec, _), mine in alike.items():
        some = [x for i in mine if (x := values[i]) is not None]
        if len(some) == 1 or codec.fmt is None:
            for i, x in zip(mine, some, strict=True):
                found[i] = codec.encode(x, ran)
            continue
        rows = torch.cat([x.reshape(1, 1, -1, x.shape[3]) for x in some], 2)
        parts = [t.split([x.shape[:3].numel() for x in some], 2) for t in codec.encode(rows, ran)]
        for i, x, held in zip(mine, some, zip(*parts, strict=True), strict=True):
            found[i] = tuple(t.view(*x.shape[:3], -1) for t in held)
    return found
