"""How packed slots get to other pools: what stays in a pool moves, the rest is encoded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch.cache.slots import rows
from kvsearch.cache.slots.formats import Ran
from kvsearch.cache.slots.pools import Pools, as_held, first_slots, part_in_use
from kvsearch.rules.pick import pick
from kvsearch_kernels.repack_kv import NewPool, repack_kv

_Asked = list[tuple[Pools, list[NewPool | None]]]


Moved = tuple[Pools, Tensor | None, Tensor, Tensor | None]  # store, keep, pools, source


def move(moves: Sequence[Moved]) -> None:
    """Let each store of a layer hold the slots `keep` in `pools`, see `DenseStore.compact`.

    Where all these slots are, pool after pool, may be known: `Choice.source` of `choose_slots`.

    What a kernel can make it makes at once for all of them, and so are the bytes of the rest moved.
    """
    kernel: _Asked = []
    rest: _Asked = []
    for store, keep, pools, source in moves:
        new = _new_pools(store, keep, pools, source)
        asked = [pool for pool in new if pool is not None]
        takes = bool(asked) and repack_kv.pick(asked, **_types(store)) == "triton"
        (kernel if takes else rest).append((store, new))
    for some in (kernel, rest):
        if not some:
            continue
        ran: dict[str, str] = {}
        every = [pool for _, new in some for pool in new if pool is not None]
        made = (_packed if some is kernel else rows.repack)(ran, every, **_types(some[0][0]))
        found = iter(made)
        for store, new in some:
            store.ran.update(ran)
            for i, pool in enumerate(new):
                sides = (None, None) if pool is None else next(found)
                if sides is not None:
                    store.keys[i], store.values[i] = sides


def _packed(
    ran: Ran, pools: Sequence[NewPool], *, dtype: torch.dtype, native: torch.dtype
) -> Sequence[rows.Sides | None]:
    """`repack_kv`, and its results as they are held."""
    made = repack_kv.record(ran, pools, dtype=dtype, native=native)
    return [(as_held(keys), as_held(values)) for keys, values in made]


def _types(store: Pools) -> dict[str, torch.dtype]:
    """Types that values have while they move, and in 16 bits."""
    return {"dtype": store.dtype, "native": store.codecs[-1][0].native}


def _new_pools(
    store: Pools, keep: Tensor | None, pools: Tensor, source: Tensor | None
) -> list[NewPool | None]:
    """Pools as `repack_kv` is to make them, None where nothing is left."""
    there = [i for i, x in enumerate(store.keys) if x is not None and x[0].shape[2]]
    n = pools.shape[-1]
    counts = store.counts(n)
    if not there or not n:
        return [None] * len(counts)
    parts = [part_in_use(store, i) for i in there]
    if source is None:
        source = _source(store.order_in_use(), keep, pools, counts)
    found: list[NewPool | None] = []
    for i, (count, (kc, vc)) in enumerate(zip(counts, store.codecs, strict=True)):
        own = there.index(i) if i in there else None
        mine, source = source[..., :count], source[..., count:]
        found.append(NewPool(mine, parts, own, (kc.fmt, vc.fmt)) if count else None)
    return found


def _source(
    order: Tensor | None, keep: Tensor | None, pools: Tensor, counts: Sequence[int]
) -> Tensor:
    """Where the slots `keep` are, pool after pool; before they are in the `order` of a store."""
    if keep is None:
        source = first_slots(pools.shape[-1], pools.device) if order is None else order
    else:
        source = keep if order is None else pick(order, keep)
    if sum(count > 0 for count in counts) > 1:  # else all go to one pool, and are in order there
        source = pick(source, pools.argsort(dim=-1, stable=True))
    return source
