"""How packed slots get to other pools: what stays in a pool moves, the rest is encoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvsearch.cache.formats import Codec, Held, Ran
from kvsearch.rules.pick import pick
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.quantize_kv import Packed
from kvsearch_kernels.repack_kv import NewPool, repack_kv


class Pools(Protocol):
    """What is held, pool by pool: the part of a `PackedStore` that a compaction changes.

    Attributes:
        codecs: of keys and values of each pool.
        keys, values: what each pool holds, None of nothing.
        ran: where to note which implementation of each op ran.
        dtype: of values that are decoded to be encoded anew.
        lead: tokens that the first group of scales lacks.
    """

    codecs: list[tuple[Codec, Codec]]
    keys: list[Held | None]
    values: list[Held | None]
    ran: Ran
    dtype: torch.dtype
    lead: int

    def counts(self, n: int) -> tuple[int, ...]:
        """Slots of each pool after a compaction left `n`."""

    def slot_pools(self) -> Tensor:
        """Pool of every slot in order of time."""

    def order_in_use(self) -> Tensor | None:
        """Where slots in order of time are when pools follow one another; None if in that order."""


def move(moves: Sequence[tuple[Pools, Tensor | None, Tensor]]) -> None:
    """Let each store of a layer hold the slots `keep` in `pools`, see `DenseStore.compact`.

    What a kernel can make it makes at once for all of them; the rest moves tensor by tensor.
    """
    asked: list[tuple[Pools, list[NewPool | None]]] = []
    for store, keep, pools in moves:
        stay = first_slots(pools.shape[-1], pools.device) if keep is None else keep
        new = _new_pools(store, stay, pools, every=keep is None)
        if new is None:
            _move_all(store, stay, pools)
        else:
            asked.append((store, new))
    if not asked:
        return
    first, ran = asked[0][0], dict[str, str]()
    every = [pool for _, new in asked for pool in new if pool is not None]
    found = iter(repack_kv.record(ran, every, **_types(first)))
    for store, new in asked:
        store.ran.update(ran)
        made = [None if pool is None else next(found) for pool in new]
        for which, side in enumerate((store.keys, store.values)):
            side[:] = [None if x is None else _as_held(x[which]) for x in made]


def _types(store: Pools) -> dict[str, torch.dtype]:
    """Types that values have while they move, and in 16 bits."""
    return {"dtype": store.dtype, "native": store.codecs[-1][0].native}


_slots: dict[torch.device, Tensor] = {}


def first_slots(n: int, device: torch.device) -> Tensor:
    """The indices of `n` slots, in a row; what is kept of them on a device is twice as long."""
    if device not in _slots or _slots[device].shape[0] < n:
        _slots[device] = torch.arange(max(2 * n, 1024), device=device)
    return _slots[device][:n]


def _new_pools(
    store: Pools, keep: Tensor, pools: Tensor, *, every: bool
) -> list[NewPool | None] | None:
    """Pools as `repack_kv` is to make them, None where nothing is left; None if no kernel can.

    `every` says that all slots stay.
    """
    there = [i for i, x in enumerate(store.keys) if x is not None and x[0].shape[2]]
    counts = store.counts(keep.shape[-1])
    if not there or not any(counts):
        return None
    parts = [part_in_use(store, i) for i in there]

    def asked(source: Tensor) -> list[NewPool | None]:
        found: list[NewPool | None] = []
        rest = source
        for i, (count, (kc, vc)) in enumerate(zip(counts, store.codecs, strict=True)):
            own = there.index(i) if i in there else None
            mine, rest = rest[..., :count], rest[..., count:]
            found.append(NewPool(mine, parts, own, (kc.fmt, vc.fmt)) if count else None)
        return found

    # which slots go where does not matter to a kernel, and finding out takes some launches
    if repack_kv.pick([x for x in asked(keep) if x is not None], **_types(store)) != "triton":
        return None
    order = store.order_in_use()
    source = keep if order is None else order if every else pick(order, keep)
    if sum(n > 0 for n in counts) > 1:  # else all go to one pool, and are in order there
        source = pick(source, pools.argsort(dim=-1, stable=True))
    return asked(source)


def part_in_use(store: Pools, i: int) -> Part:
    """The slots in use of pool `i`."""
    (kc, vc), k, v = store.codecs[i], store.keys[i], store.values[i]
    assert k is not None and v is not None
    return Part(kc.packed(k, store.lead), vc.packed(v), kc.fmt, vc.fmt)


def _as_held(x: Tensor | Packed) -> Held:
    """What an op made, as it is held."""
    if isinstance(x, Tensor):
        return (x,)
    return (x.codes, x.scales.flatten(-2)) if x.scales.shape[-1] else (x.codes,)


@dataclass(frozen=True)
class _Move:
    """What a compaction does to one pool.

    Attributes:
        index: of its slots after, among those before and then those that enter; None: no change.
        entering: pool before, and index there, of the slots that enter it; None: there are none.
    """

    index: Tensor | None
    entering: tuple[Tensor, Tensor] | None


def _move_all(store: Pools, keep: Tensor, pools: Tensor) -> None:
    """`compact`, tensor by tensor."""
    old = store.slot_pools()
    place = place_in_pool(old, len(store.codecs))
    moves: list[_Move | None] = []
    for i, count in enumerate(store.counts(keep.shape[-1])):
        source = pick(keep, first_of(pools == i, count))
        moves.append(_planned(store, i, source, old, place) if count else None)
    for which, held in enumerate((store.keys, store.values)):
        held[:] = [
            None if m is None else _move(store, which, held, i, m) for i, m in enumerate(moves)
        ]


def _most_entering(store: Pools, enters: Tensor, i: int, held: list[Held | None]) -> int:
    """Most slots of any head that enter pool `i`; an upper bound where counting would wait."""
    if enters.device.type == "cpu":
        return int(enters.sum(-1).max())
    others = sum(h[0].shape[2] for j, h in enumerate(held) if j != i and h is not None)
    return min(enters.shape[-1], others)


def _planned(store: Pools, i: int, source: Tensor, old: Tensor, place: Tensor) -> _Move:
    """What a compaction does to pool `i`, for keys and values alike.

    Args:
        i: the pool.
        source: slot before, of each slot after, `[n]` or `[B, V, n]`.
        old: pool of every slot before.
        place: its index there.
    """
    enters = pick(old, source) != i
    most = _most_entering(store, enters, i, store.keys)  # heads may differ: some encode in vain
    mine = store.keys[i]
    size = 0 if mine is None else mine[0].shape[2]
    if most == 0 and size == source.shape[-1]:
        return _Move(None, None)
    index = pick(place, source)
    if most == 0:
        return _Move(index, None)
    slots = pick(source, first_of(enters, most))
    index = torch.where(enters, size + enters.cumsum(-1) - 1, index)
    return _Move(index, (pick(old, slots), pick(place, slots)))


def _move(store: Pools, which: int, held: list[Held | None], i: int, move: _Move) -> Held:
    """Contents of pool `i` after a compaction: what stays is moved, what enters is encoded.

    Args:
        which: 0 for keys, 1 for values.
        held: all pools before.
        i: the pool.
        move: what happens to it.
    """
    mine = held[i]
    if move.index is None:
        assert mine is not None
        return mine
    new = None if move.entering is None else _enter(store, which, held, i, *move.entering)
    both = [x for x in (mine, new) if x is not None]
    joined = both[0] if len(both) == 1 else [torch.cat(x, 2) for x in zip(*both, strict=True)]
    return tuple(gather_kv.record(store.ran, x, move.index) for x in joined)


def _enter(
    store: Pools, which: int, held: list[Held | None], i: int, old: Tensor, place: Tensor
) -> Held:
    """Slots that were at `place` of pools `old`, in the format of pool `i`."""
    codec = store.codecs[i][which]
    origins = [j for j, x in enumerate(held) if x is not None and j != i]
    values: Tensor | None = None
    for j in origins:
        rows, source = held[j], store.codecs[j][which]
        assert rows is not None
        at = place.clamp_max(rows[0].shape[2] - 1)  # of other pools' slots: any row will do
        if len(origins) == 1 and source.fmt is None:
            return codec.encode(rows[0], store.ran, at)
        rows = tuple(gather_kv.record(store.ran, x, at) for x in rows)
        x = source.decode(rows, store.dtype, store.ran)
        values = x if values is None else torch.where((old == j).unsqueeze(-1), x, values)
    assert values is not None
    return codec.encode(values, store.ran)


def first_of(mask: Tensor, count: int) -> Tensor:
    """Where the first `count` true entries of `mask` `[..., N]` are; what is false comes after."""
    return (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]


def place_in_pool(pools: Tensor, kinds: int) -> Tensor:
    """Index of each slot among the slots of its pool, same shape as `pools`."""
    place = torch.zeros(pools.shape, dtype=torch.long, device=pools.device)
    for i in range(kinds):
        mine = pools == i
        place = torch.where(mine, mine.cumsum(-1) - 1, place)
    return place
