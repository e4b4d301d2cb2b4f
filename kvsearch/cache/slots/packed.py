"""The store of deployment: every pool holds packed codes and scales, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Held, Ran, codecs
from kvsearch.cache.slots.groups import compact_groups
from kvsearch.cache.slots.moving import move
from kvsearch.cache.slots.pools import read
from kvsearch.cache.slots.stable_buffers import NativePool, StableBuffer, back, spare
from kvsearch.policy import LayerLayout
from kvsearch_kernels.choose_slots import Choice
from kvsearch_kernels.copy_rows import Copy, copy_rows
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.time_order import time_order

_Told = tuple[tuple[Held, Held, int], Part]  # what was held, and the part that says so


class PackedStore:
    """Slots of one layer in their real formats; the same interface as `DenseStore`.

    Each pool keeps its tokens in order of time; the last pool is 16 bits: fp16 sinks, then the
    residual tokens that no compaction has seen. Where a slot's tier follows from its order, nothing
    more is held; where it follows from ranks, one tag byte per slot is.

    Args:
        layer: integers of the layer.
        native: the 16-bit type.
        ran: where to note which implementation of each op ran.
    """

    def __init__(self, layer: LayerLayout, native: torch.dtype, ran: Ran | None = None) -> None:
        self.layer, self.codecs = layer, codecs(layer, native)
        self.residual_pool = len(self.codecs) - 1
        self.tagged = layer.policy.tagged
        self.grouped, self.lead = self.codecs[0][0].along_tokens, 0
        self.ran: Ran = {} if ran is None else ran
        self.n = self.residual = 0
        self.dtype = torch.float32
        self._keys: list[Held | None] = [None] * len(self.codecs)
        self._values: list[Held | None] = [None] * len(self.codecs)
        self._grown: NativePool | None = None  # the 16-bit pool, if tokens came since it was shown
        self.pools = torch.empty(0, dtype=torch.uint8, device="cpu")  # of compacted slots
        self.native_pool: NativePool | None = None  # the 16-bit pool, once tokens come one by one
        self._lengths: dict[int, tuple[int, Tensor]] = {}  # slots of each tier, on the device too
        self._parts: list[_Told | None] = [None] * len(self.codecs)  # what `parts` said last
        self._order, self._index, self._roomy = StableBuffer(), StableBuffer(), StableBuffer()
        self._tagged: Tensor | None = None  # pools of all slots that there is room for, if known
        self.edition = 0  # whoever remembers what `parts` said asks whether this is as it was

    def append(self, k: Tensor, v: Tensor, quantised: tuple[Tensor, Tensor] | None = None) -> None:
        """Add tokens `[B, H, M, D]` in 16 bits; `quantised` is for the dense store only."""
        self.dtype = k.dtype
        if self.n == 0:
            self.pools = self.pools.to(k.device)
        m = k.shape[2]
        if m == 1 and self.repeats(k.device):
            pool = self.reserve(k, v)
            pool.keys[:, :, pool.used : pool.used + 1] = k
            pool.values[:, :, pool.used : pool.used + 1] = v
            pool.lengths += 1
            self.counted()
            return
        self._forget_parts(-1)
        for which, (pools, x) in enumerate(((self.keys, k), (self.values, v))):
            (new,) = self.codecs[-1][which].encode(x, self.ran)
            old = pools[-1]
            pools[-1] = (new,) if old is None else (torch.cat([old[0], new], 2),)
        self.native_pool = None
        self.n += m
        self.residual += m

    def reserve(self, k: Tensor, v: Tensor) -> NativePool:
        """The 16-bit pool, with room for a token like `k` and `v` `[B, H, 1, D]`."""
        pool, held = self.native_pool, self._native()
        if pool is None or pool.used == pool.capacity:
            used = 0 if held is None else held[0].shape[2]
            size, native = spare(self.layer, used, self.residual), self.codecs[-1][0].native
            pool = self.native_pool = NativePool.of(held, (k, v), used + size, native, pool)
            self._forget_parts(-1)
            self._tell_lengths()
        return pool

    def counted(self) -> None:
        """Count a token that was written behind those in use of the pool."""
        pool = self.native_pool
        assert pool is not None
        pool.used += 1
        self.n += 1
        self.residual += 1
        self._grown = pool

    @property
    def keys(self) -> list[Held | None]:
        """What each pool holds of keys, None of nothing."""
        self._show()
        return self._keys

    @property
    def values(self) -> list[Held | None]:
        """What each pool holds of values, None of nothing."""
        self._show()
        return self._values

    def _show(self) -> None:
        """Views of the 16-bit pool with the tokens that came: not made at each, which costs."""
        if self._grown is not None:
            self._keys[-1], self._values[-1] = self._grown.shown()
            self._grown = None

    def _native(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values of the 16-bit pool."""
        k, v = self.keys[-1], self.values[-1]
        return None if k is None or v is None else (k[0], v[0])

    @property
    def fixed(self) -> bool:
        """Whether `parts` say the same until the next compaction, with lengths on the device."""
        return self.native_pool is not None

    @staticmethod
    def repeats(device: torch.device) -> bool:
        """Whether steps are to repeat their launches. A CPU has no graphs, and copies little."""
        return device.type != "cpu"

    @property
    def capacity(self) -> int:
        """Slots that `parts` speak of, in use or not."""
        pool = self.native_pool
        return self.n if pool is None else self.n + pool.capacity - pool.used

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` in order of time, unpacked for one use."""
        return read([self])[0]

    def order(self) -> Tensor | None:
        """Where slots in order of time lie when pools follow one another; None if in that order.

        Of all that there is room for, so that it stays the same until the next compaction: new
        tokens come behind all others in either order.
        """
        if not self._mixed():
            return None  # residual tokens follow the one pool there is
        return self._order.get(self.capacity, lambda: time_order.record(self.ran, self._tags()))

    def index(self) -> Tensor | None:
        """The inverse of `order`: where each slot of pool after pool is in order of time."""
        if not self._mixed():
            return None
        return self._index.get(self.capacity, lambda: self._tags().argsort(dim=-1, stable=True))

    def _mixed(self) -> bool:
        """Whether several pools hold slots that a compaction has seen."""
        sizes = [0 if x is None else x[0].shape[2] for x in self.keys]
        sizes[-1] -= self.residual
        return sum(n > 0 for n in sizes) > 1

    def room_after(self, n: int) -> int:
        """Slots that there will be room for when a compaction has left `n`."""
        if self.native_pool is None:
            return n
        return n + spare(self.layer, self.counts(n)[-1], 0)

    def _tags(self) -> Tensor:
        """Pool of every slot in order of time, and of those that there is room for."""
        if self._tagged is not None and self._tagged.shape[-1] == self.capacity:
            return self._tagged
        free = (*self.pools.shape[:-1], self.capacity - self.n)
        return torch.cat([self.slot_pools(), self.pools.new_full(free, self.residual_pool)], -1)

    def order_in_use(self) -> Tensor | None:
        """`order` of the slots in use."""
        found = self.order()
        return None if found is None else found[..., : self.n]

    def parts(self) -> list[Part]:
        """What is held, packed as it is, for `decode_step`."""
        found = []
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            pool = self.native_pool if self.fixed else None
            if pool is not None and i == self.residual_pool:
                k, v = (pool.keys,), (pool.values,)  # the same part until it is full
            if k is None or v is None:
                continue
            kc, vc = self.codecs[i]
            held, last = (k, v, 0 if i == self.residual_pool else self.lead), self._parts[i]
            lengths = None
            if pool is not None:
                lengths = self._lengths[i][1] if i in self._lengths else pool.lengths
            if last is None or not _same(held, last[0]):
                keys, values = kc.packed(held[0], self.lead), vc.packed(held[1])
                part = Part(keys, values, kc.fmt, vc.fmt, lengths)
                last = self._parts[i] = (held, part)
            found.append(last[1])
        return found

    def _forget_parts(self, first: int = 0) -> None:
        """Let go of what `parts` said from pool `first` on, so that replaced tensors are freed."""
        for i in range(len(self.codecs))[first:]:
            self._parts[i] = None
        self._order.forget()
        self._index.forget()
        self.edition += 1

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` and move every slot into its pool, see `DenseStore.compact`."""
        copies: list[Copy] = []
        compact_together([Move(self, keep, pools)], copies)
        if copies:
            copy_rows.record(self.ran, copies)

    def _lie(self) -> list[Held | None]:
        """What the tiers hold: on a device they go back there; a CPU has no graphs to need it."""
        return [*self.keys[:-1], *self.values[:-1]] if self.repeats(self.device) else []

    def _land(self, before: list[Held | None], copies: list[Copy]) -> None:
        """Let what a compaction left lie where it lay, so that the next step finds it there."""
        self._forget_parts()
        pool, held = self.native_pool, self._native()
        if pool is None:
            return
        self._tell_lengths(copies)
        used = 0 if held is None else held[0].shape[2]
        size = used + spare(self.layer, used, 0)
        if pool.capacity == size:
            pool.replace(held, copies)
        else:
            pool = NativePool.of(held, (pool.keys, pool.values), size, pool.keys.dtype, pool)
            self.native_pool = pool
        self.keys[-1], self.values[-1] = pool.shown()
        back(before, copies, self.keys, self.values)

    def _know(self, choice: Choice, copies: list[Copy]) -> None:
        """Remember what was found with the slots that stay: where they are, and their pools."""
        if choice.order is None:  # `order` will read the pools, before the copies are made
            return
        if self._mixed():
            self._order.put(choice.order, copies)
        if choice.pools is not None and self.tagged:
            self._tagged = self._roomy.put(choice.pools, copies)
            self.pools = self._tagged[..., : self.n]

    def _tell_lengths(self, copies: list[Copy] | None = None) -> None:
        """Write the slots of each tier to the device; what is known there is not written again."""
        for i, held in enumerate(self.keys[:-1]):
            if held is None:
                continue
            n, known = held[0].shape[2], self._lengths.get(i)
            if known is None or known[1].shape != held[0].shape[:2]:
                found = torch.full(held[0].shape[:2], n, dtype=torch.int32, device=held[0].device)
                self._lengths[i] = n, found
            elif known[0] != n:
                self._lengths[i] = n, known[1]
                if copies is None:
                    known[1].fill_(n)
                else:
                    copies.append(Copy(known[1], n))

    def counts(self, n: int) -> tuple[int, ...]:
        """Slots of each pool after a compaction left `n`: known to the host, so nothing waits."""
        tiers = self.layer.tier_counts(n)
        return (*tiers, n - sum(tiers))

    def load(self, k: Tensor, v: Tensor, pools: Tensor, residual: int, lead: int = 0) -> None:
        """Start from 16-bit values `[B, H, N, D]`, see `Store.load`."""
        compacted = k.shape[2] - residual
        self._forget_parts()
        self.native_pool = None
        self.n = self.residual = self.lead = 0
        self._tagged = None
        self.keys[:], self.values[:] = ([None] * len(self.codecs) for _ in range(2))
        self.pools = self.pools.new_empty(0)
        if compacted:
            self.append(k[:, :, :compacted], v[:, :, :compacted])
            self.compact(None, pools[..., : compacted - lead])
            if lead:
                compact_groups([(self, self.n - lead)])
        if residual:
            self.append(k[:, :, compacted:], v[:, :, compacted:])

    def hold(
        self, keys: list[Held | None], values: list[Held | None], n: int, pools: Tensor
    ) -> None:
        """Hold `n` compacted slots, given what is held of each pool and the pool of every slot."""
        self._forget_parts()
        self.native_pool = None
        self.keys[:], self.values[:] = keys, values
        if not self.tagged:
            pools = pools.reshape(-1, pools.shape[-1])[0]
        self.n, self.residual, self.pools = n, 0, pools.to(torch.uint8)
        self._tagged = None

    def slot_pools(self) -> Tensor:
        """Pool of every slot."""
        if self._tagged is not None and self.n <= self._tagged.shape[-1]:
            return self._tagged[..., : self.n]
        fresh = self.pools.new_full((*self.pools.shape[:-1], self.residual), self.residual_pool)
        return torch.cat([self.pools, fresh], -1)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return next((h[0].device for h in self.keys if h is not None), torch.device("cpu"))

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of all tensors held."""
        held = [t for pool in (*self.keys, *self.values) if pool is not None for t in pool]
        if not held:
            return 0
        total = sum(t.nbytes for t in held) // held[0].shape[0]
        if self.tagged:  # tags of one sequence; layer-wide votes share one row
            total += self.pools.nbytes // max(1, self.pools.shape[0])
        return total

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self._forget_parts()
        self.native_pool = None
        for pools in (self.keys, self.values):
            pools[:] = [None if h is None else tuple(t[rows] for t in h) for h in pools]
        self._tagged = None
        if self.pools.dim() == 3 and self.pools.shape[0] > 1:
            self.pools = self.pools[rows]


@dataclass(frozen=True)
class Move:
    """What a compaction does to a store, see `DenseStore.compact`, and what is known of it."""

    store: PackedStore
    keep: Tensor | None
    pools: Tensor
    choice: Choice | None = None


def compact_together(moves: Sequence[Move], copies: list[Copy]) -> None:
    """`PackedStore.compact` of stores of a layer: all slots move at once.

    What is to lie where it lay is added to `copies`, to be made before a store is read.
    """
    before = [m.store._lie() for m in moves]
    flat = [m.pools if m.store.tagged else m.pools.reshape(-1, m.pools.shape[-1])[0] for m in moves]
    move([
        (m.store, m.keep, pools, None if m.choice is None else m.choice.source)
        for m, pools in zip(moves, flat, strict=True) if not m.store.grouped
    ])  # fmt: skip
    compact_groups([
        (m.store, m.store.n if m.keep is None else m.keep.shape[-1])
        for m in moves if m.store.grouped
    ])  # fmt: skip
    for m, pools, held in zip(moves, flat, before, strict=True):
        store = m.store
        if not store.grouped:  # these know, and `load` gives them fewer pools than slots
            store.n, store.residual = pools.shape[-1], 0
        store.pools, store._tagged = pools.to(torch.uint8), None
        store._land(held, copies)
        if m.choice is not None:
            store._know(m.choice, copies)


def _same(held: tuple[Held, Held, int], last: tuple[Held, Held, int]) -> bool:
    """Whether the same tensors are held."""
    now, then = ((*k, *v) for k, v, _ in (held, last))
    return held[2] == last[2] and all(x is y for x, y in zip(now, then, strict=True))
