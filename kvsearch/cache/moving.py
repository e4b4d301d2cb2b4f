"""How packed slots get to other pools: what stays in a pool moves, the rest is encoded."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsearch.cache.formats import Codec, Held, Ran
from kvsearch.rules.pick import pick
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.quantize_kv import Packed
from kvsearch_kernels.repack_kv import repack_kv


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


def move(store: Pools, keep: Tensor | None, pools: Tensor) -> None:
    """Let `store` hold the slots `keep` in `pools`, see `DenseStore.compact`."""
    stay = first_slots(pools.shape[-1], pools.device) if keep is None else keep
    if not _repacked(store, stay, pools, every=keep is None):
        _move_all(store, stay, pools)


_slots: dict[torch.device, Tensor] = {}


def first_slots(n: int, device: torch.device) -> Tensor:
    """The indices of `n` slots, in a row; what is kept of them on a device is twice as long."""
    if device not in _slots or _slots[device].shape[0] < n:
        _slots[device] = torch.arange(max(2 * n, 1024), device=device)
    return _slots[device][:n]


def _repacked(store: Pools, keep: Tensor, pools: Tensor, *, every: bool) -> bool:
    """`compact` where one kernel makes a whole pool: a launch for each; False if it cannot.

    `every` says that all slots stay.
    """
    there = [i for i, x in enumerate(store.keys) if x is not None and x[0].shape[2]]
    if not there:
        return False
    parts = [_part(store, i) for i in there]
    made: list[tuple[Any, Any] | None] = []
    source, start = keep, 0
    more = {"dtype": store.dtype, "native": store.codecs[-1][0].native}
    for i, (count, (kc, vc)) in enumerate(
        zip(store.counts(keep.shape[-1]), store.codecs, strict=True)
    ):
        if not count:
            made.append(None)
            continue
        own, formats = there.index(i) if i in there else None, (kc.fmt, vc.fmt)
        if repack_kv.pick(source[..., :count], parts, own, formats, **more) != "triton":
            return False
        if source is keep:
            order = store.order_in_use()
            old = keep if order is None else order if every else pick(order, keep)
            source = pick(old, pools.argsort(dim=-1, stable=True))
        mine = source[..., start : start + count]
        made.append(repack_kv.record(store.ran, mine, parts, own, formats, **more))
        start += count
    for which, side in enumerate((store.keys, store.values)):
        side[:] = [None if x is None else _as_held(x[which]) for x in made]
    return True


def _part(store: Pools, i: int) -> Part:
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
