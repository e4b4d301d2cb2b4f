"""The store of deployment: every pool holds packed codes and scales, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.cache.slots.dense import DenseStore
from kvsearch.cache.slots.formats import Held, Ran, as_held, codecs, entering
from kvsearch.policy import LayerLayout
from kvsearch.rules.base import pick
from kvsearch_kernels.choose_slots import Choice
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.picking import first_of, first_slots, gather
from kvsearch_kernels.repack_kv import NewPool, repack_kv

LEAST = 32  # slots by which a pool grows that nothing bounds


class PackedStore:
    """Slots of one layer in their real formats; the same interface as `DenseStore`.

    Each pool keeps its tokens in order of time; the last pool is 16 bits: fp16 sinks, then the
    residual tokens that no compaction has seen. Where a slot's tier follows from its order, nothing
    more is held; where it follows from ranks, one tag byte per slot is.

    Args:
        layer: integers of the layer.
        native: the 16-bit type.
        ran: where to note which implementation of each op ran.

    Attributes:
        used: slots of the 16-bit pool, which has room for tokens that come one by one.
        tags: pool of every compacted slot, `[N]` or `[B, V, N]` uint8.
        version: changes with everything but a token that `added` or `entered` counts.
    """

    def __init__(self, layer: LayerLayout, native: torch.dtype, ran: Ran | None = None) -> None:
        self.layer, self.codecs = layer, codecs(layer, native)
        self.residual_pool = len(self.codecs) - 1
        self.tagged = layer.policy.tagged
        self.grouped = self.codecs[0][0].along_tokens
        self.ran: Ran = {} if ran is None else ran
        self.dtype, self.version = torch.float32, 0
        self._empty(torch.device("cpu"))

    def _empty(self, device: torch.device) -> None:
        """Hold nothing."""
        none: list[Held | None] = [None] * len(self.codecs)
        self._pools = none, none.copy()  # of keys and of values; the last with its room
        self.n = self.residual = self.used = self.lead = 0
        self.tags = torch.empty(0, dtype=torch.uint8, device=device)
        self._order: Tensor | None = None
        self.version += 1

    @property
    def types(self) -> dict[str, torch.dtype]:
        """Type that values have in between, and that of 16 bits, for `repack_kv`."""
        return {"dtype": self.dtype, "native": self.codecs[-1][0].native}

    # -- tokens --------------------------------------------------------------------------------

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, H, M, D]` in 16 bits."""
        m = k.shape[2]
        self.dtype = k.dtype
        if self.n == 0:
            self.tags = self.tags.to(k.device)
        self.reserve(k, v, m)
        for pool, x in zip(self._room(), (k, v), strict=True):
            pool[:, :, self.used : self.used + m] = x
        self.added(m)
        self.version += 1

    def reserve(self, k: Tensor, v: Tensor, m: int = 1) -> None:
        """Have room for `m` tokens like `k` and `v` `[B, H, 1, D]` in the 16-bit pool.

        Tokens that come one by one have room until the next compaction.
        """
        if self.capacity - self.n >= m:
            return
        size = self.used + (m if m > 1 else spare(self.layer, self.used, self.residual))
        for held, x in zip(self._pools, (k, v), strict=True):
            new = x.new_empty(*x.shape[:2], size, x.shape[3], dtype=self.codecs[-1][0].native)
            if (old := held[-1]) is not None:
                new[:, :, : self.used] = old[0][:, :, : self.used]
            held[-1] = (new,)
        self.version += 1

    def added(self, m: int = 1) -> None:
        """Count tokens that were written behind those in use of the 16-bit pool."""
        self.used += m
        self.n += m
        self.residual += m

    def opened(self, size: int) -> tuple[Held, Held]:
        """Have room for `size` slots in the one tier, which holds all: keys and values with it."""
        sides: list[Held] = []
        for side in self._pools:
            assert side[0] is not None
            new = tuple(x.new_empty(*x.shape[:2], size, x.shape[3]) for x in side[0])
            for x, old in zip(new, side[0], strict=True):
                x[:, :, : self.n] = old
            sides.append(new)
        keys, values = sides
        self.version += 1
        self.entered((keys, values), self.n)
        return keys, values

    def entered(self, sides: tuple[Held, Held], n: int) -> None:
        """Hold the first `n` slots of an `opened` tier."""
        for side, held in zip(self._pools, sides, strict=True):
            side[0] = tuple(x[:, :, :n] for x in held)
        self.n, self.tags = n, self.tags.new_zeros(n)

    def _room(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the 16-bit pool, with its room."""
        keys, values = (x[-1] for x in self._pools)
        assert keys is not None and values is not None
        return keys[0], values[0]

    @property
    def capacity(self) -> int:
        """Slots that there is room for."""
        native = self._pools[0][-1]
        return self.n if native is None else self.n + native[0].shape[2] - self.used

    def room_after(self, n: int) -> int:
        """Slots that there is to be room for when a compaction has left `n`."""
        return n + spare(self.layer, self.counts(n)[-1], 0)

    # -- what is held --------------------------------------------------------------------------

    @property
    def keys(self) -> list[Held | None]:
        """What each pool holds of keys, None of nothing."""
        return self._in_use(0)

    @property
    def values(self) -> list[Held | None]:
        """What each pool holds of values, None of nothing."""
        return self._in_use(1)

    def _in_use(self, side: int) -> list[Held | None]:
        *tiers, native = self._pools[side]
        if native is None or not self.used:
            return [*tiers, None]
        return [*tiers, (native[0][:, :, : self.used],)]

    def _put(self, pool: int, sides: Sequence[Held | None]) -> None:
        """Let a pool hold these keys and values, or nothing."""
        for held, new in zip(self._pools, sides, strict=True):
            held[pool] = new
        if pool in (-1, self.residual_pool):
            self.used = 0 if sides[0] is None else sides[0][0].shape[2]

    def _parts(self) -> list[tuple[int, Part]]:
        """Pools that hold something, and what of it is in use."""
        every = zip(self.codecs, self.keys, self.values, strict=True)
        return [
            (i, Part(kc.packed(k, self.lead), vc.packed(v), kc.fmt, vc.fmt))
            for i, ((kc, vc), k, v) in enumerate(every)
            if k is not None and v is not None and k[0].shape[2]
        ]

    def parts(self) -> list[Part]:
        """What is held, packed as it is, for `decode_step`: the 16-bit pool comes with its room."""
        keys, values = self._room()
        lengths = torch.full(keys.shape[:2], self.used, dtype=torch.int32, device=keys.device)
        tiers = [part for i, part in self._parts() if i != self.residual_pool]
        return [*tiers, Part(keys, values, None, None, lengths)]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` in order of time, unpacked for one use."""
        order = self.order(self.n)
        if (whole := self._whole(order)) is not None:
            ((keys, values),) = repack_kv.record(self.ran, [whole], **self.types)
            assert isinstance(keys, Tensor) and isinstance(values, Tensor)
            return keys, values
        keys, values = (self._unpacked(side, order) for side in (0, 1))
        return keys, values

    def _unpacked(self, side: int, order: Tensor | None) -> Tensor:
        """Keys (0) or values (1) of all pools in an `order`."""
        found = [
            self.codecs[i][side].decode(x, self.dtype, self.ran, self.lead)
            for i, x in enumerate(self._in_use(side))
            if x is not None
        ]
        x = found[0] if len(found) == 1 else torch.cat(found, 2)
        return x if order is None else gather(x, order)

    def _whole(self, order: Tensor | None) -> NewPool | None:
        """All slots as one pool in 16 bits, where a kernel makes it with fewer launches."""
        if self.dtype is not self.types["native"] or self.grouped:
            return None
        parts = [part for _, part in self._parts()]
        if order is None and all(p.key_format is p.value_format is None for p in parts):
            return None  # they are one after the other as they are
        source = first_slots(self.n, self.device) if order is None else order
        pool = NewPool(source, parts, None, (None, None))
        return pool if repack_kv.pick([pool], **self.types) == "triton" else None

    def order(self, size: int) -> Tensor | None:
        """Where `size` slots in order of time are when pools follow one another.

        There may be more slots than are held: those to come are behind all others in either order.
        None if all are where they are in time.
        """
        if not self._mixed():
            return None  # residual tokens follow the one pool there is
        if self._order is None:
            by_pool = self.tags.argsort(dim=-1, stable=True)
            slot = torch.arange(by_pool.shape[-1], device=by_pool.device).expand(by_pool.shape)
            self._order = torch.empty_like(by_pool).scatter_(-1, by_pool, slot)
        known = self._order.shape[-1]
        if size <= known:
            return self._order[..., :size]
        more = torch.arange(known, size, device=self._order.device)
        self._order = torch.cat([self._order, more.expand(*self._order.shape[:-1], -1)], -1)
        return self._order

    def index(self, size: int) -> Tensor | None:
        """The inverse of `order`: where each slot of pool after pool is in order of time."""
        if not self._mixed():
            return None
        free = self.tags.new_full((*self.tags.shape[:-1], size - self.n), self.residual_pool)
        return torch.cat([self.slot_pools(), free], -1).argsort(dim=-1, stable=True)

    def _mixed(self) -> bool:
        """Whether several pools hold slots that a compaction has seen."""
        sizes = [0 if x is None else x[0].shape[2] for x in self._pools[0][:-1]]
        return sum(n > 0 for n in (*sizes, self.used - self.residual)) > 1

    # -- compaction ----------------------------------------------------------------------------

    def counts(self, n: int) -> tuple[int, ...]:
        """Slots of each pool after a compaction left `n`: known to the host, so nothing waits."""
        tiers = self.layer.tier_counts(n)
        return (*tiers, n - sum(tiers))

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` and move every slot into its pool, see `DenseStore.compact`."""
        compact_together([Move(self, keep, pools)])

    def rewrite(self, side: int, x: Tensor) -> None:
        """Let compacted slots have other keys or values, see `DenseStore.rewrite`."""
        pools = self.slot_pools()
        for i, (count, both) in enumerate(zip(self.counts(self.n), self.codecs, strict=True)):
            if not count:
                continue
            new = both[side].encode(gather(x, first_of(pools == i, count)), self.ran)
            if i == self.residual_pool:
                self._room()[side][:, :, : self.used] = new[0]
            else:
                self._pools[side][i] = new
        self.version += 1

    def _asked(self, move: "Move") -> list[NewPool | None]:
        """Pools as a compaction is to make them, None of those that are to be empty."""
        there, pools = self._parts(), self._tags(move.pools)
        n = pools.shape[-1]
        counts = self.counts(n)
        if not there or not n:
            return [None] * len(counts)
        source = None if move.choice is None else move.choice.source
        if source is None:
            order = self.order(self.n)
            source = first_slots(n, pools.device) if order is None else order
            if move.keep is not None:
                source = move.keep if order is None else pick(order, move.keep)
            if sum(count > 0 for count in counts) > 1:  # else they are in order in the one pool
                source = pick(source, pools.argsort(dim=-1, stable=True))
        own = {i: at for at, (i, _) in enumerate(there)}
        parts, found = [part for _, part in there], list[NewPool | None]()
        for i, (count, (kc, vc)) in enumerate(zip(counts, self.codecs, strict=True)):
            mine, source = source[..., :count], source[..., count:]
            found.append(NewPool(mine, parts, own.get(i), (kc.fmt, vc.fmt)) if count else None)
        return found

    def _tags(self, pools: Tensor) -> Tensor:
        """The pool of every slot, of all heads together where it follows from the slots' order."""
        return pools if self.tagged else pools.reshape(-1, pools.shape[-1])[0]

    def _compacted(self, n: int, pools: Tensor, choice: Choice | None = None) -> None:
        """Note what a compaction left, and where."""
        self.n, self.residual, self.tags = n, 0, self._tags(pools).to(torch.uint8)
        self._order = None if choice is None else choice.order
        self.version += 1

    def _shift(self, n: int) -> None:
        """Hold the sinks and the newest of `n` slots where keys share scales with neighbours in
        time (KIVI): the oldest codes go, and scales stay while any of their tokens does."""
        group, first = self.layer.policy.quantizer.group, self.layer.policy.fp16_sinks
        mine = self._pools[0][0]
        size = 0 if mine is None else mine[0].shape[2]
        left, new = entering(self.layer, self.n, n, size)
        assert group is not None
        gone, lead = divmod(self.lead + size - left, group) if left else (0, 0)
        tier, native = list[Held | None](), list[Held | None]()
        for side, codec in enumerate(self.codecs[0]):
            mine, *_, rest = self._in_use(side)
            parts: list[Held] = []
            if mine is not None and left:
                codes, *scales = mine  # values in 16 bits have none
                first_scale = gone if codec.along_tokens else size - left
                parts.append((codes[:, :, size - left :], *(x[:, :, first_scale:] for x in scales)))
            if rest is not None and new:
                x = rest[0]
                parts.append(codec.encode(x[:, :, first : first + new], self.ran))
                rest = (torch.cat((x[:, :, :first], x[:, :, first + new :]), 2),)
            tier.append(tuple(torch.cat(x, 2) for x in zip(*parts, strict=True)) if parts else None)
            native.append(rest)
        self._put(0, tier)
        self._put(-1, native)
        self.n, self.residual, self.lead = n, 0, lead

    def load(self, k: Tensor, v: Tensor, pools: Tensor, residual: int, lead: int = 0) -> None:
        """Start from 16-bit values `[B, H, N, D]`, see `DenseStore.load`."""
        compacted = k.shape[2] - residual
        self._empty(k.device)
        if compacted:
            self.append(k[:, :, :compacted], v[:, :, :compacted])
            self.compact(None, pools[..., : compacted - lead])
            if lead:
                self._shift(self.n - lead)
        if residual:
            self.append(k[:, :, compacted:], v[:, :, compacted:])

    def hold(
        self, keys: list[Held | None], values: list[Held | None], n: int, pools: Tensor
    ) -> None:
        """Hold `n` compacted slots, given what is held of each pool and the pool of every slot."""
        for i, sides in enumerate(zip(keys, values, strict=True)):
            self._put(i, sides)
        self._compacted(n, pools)

    # -- the rest ------------------------------------------------------------------------------

    def slot_pools(self) -> Tensor:
        """Pool of every slot."""
        fresh = self.tags.new_full((*self.tags.shape[:-1], self.residual), self.residual_pool)
        return torch.cat([self.tags, fresh], -1)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return self.tags.device

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of all tensors held."""
        held = [t for pool in (*self.keys, *self.values) if pool is not None for t in pool]
        if not held:
            return 0
        total = sum(t.nbytes for t in held) // held[0].shape[0]
        if self.tagged:  # tags of one sequence; layer-wide votes share one row
            total += self.tags.nbytes // max(1, self.tags.shape[0])
        return total

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        for pools in self._pools:
            pools[:] = [None if h is None else tuple(t[rows] for t in h) for h in pools]
        if self.tags.dim() == 3 and self.tags.shape[0] > 1:
            self.tags = self.tags[rows]
        self._order = None
        self.version += 1


Store = DenseStore | PackedStore


@dataclass(frozen=True)
class Move:
    """What a compaction does to a store, see `DenseStore.compact`, and what is known of it."""

    store: PackedStore
    keep: Tensor | None
    pools: Tensor
    choice: Choice | None = None


def compact_together(moves: Sequence[Move]) -> None:
    """`PackedStore.compact` of stores of a layer: all slots move at once."""
    asked: dict[str, list[tuple[PackedStore, int, NewPool]]] = {}  # by who is to make them
    for m in moves:
        store, pools = m.store, [] if m.store.grouped else m.store._asked(m)
        some = [(store, i, pool) for i, pool in enumerate(pools) if pool is not None]
        if some:
            store.ran[repack_kv.name] = repack_kv.pick([x for *_, x in some], **store.types)
            asked.setdefault(store.ran[repack_kv.name], []).extend(some)
        for i, pool in enumerate(pools):
            if pool is None:
                store._put(i, (None, None))
    for impl, some in asked.items():
        made = repack_kv.again(impl, [pool for *_, pool in some], **some[0][0].types)
        for (store, i, _), (keys, values) in zip(some, made, strict=True):
            store._put(i, (as_held(keys), as_held(values)))
    for m in moves:
        n = m.pools.shape[-1]
        if m.store.grouped:  # `load` gives these fewer pools than slots
            n = m.store.n if m.keep is None else m.keep.shape[-1]
            m.store._shift(n)
        m.store._compacted(n, m.pools, m.choice)


def spare(layer: LayerLayout, held: int, residual: int) -> int:
    """Slots to have free behind `held`, of which the last `residual` wait for a compaction.

    They are what the policy holds at its next compaction; where none is due, an eighth more than
    what is held.
    """
    if layer.interval is None or layer.policy.trigger == "prompt":
        return max(LEAST, held // 8)
    return layer.interval - residual % layer.interval
