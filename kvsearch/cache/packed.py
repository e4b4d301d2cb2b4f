"""The store of deployment: every pool holds packed codes and scales, and nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.cache.formats import Held, Ran, codecs
from kvsearch.cache.rotary import Rotary
from kvsearch.cache.store import entering
from kvsearch.policy import LayerLayout
from kvsearch.rules.pick import pick
from kvsearch_kernels.decode_attention import Part
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.time_order import time_order

_Told = tuple[tuple[Held, Held, int], Part]  # what was held, and the part that says so


@dataclass(frozen=True)
class _Move:
    """What a compaction does to one pool.

    Attributes:
        index: of its slots after, among those before and then those that enter; None: no change.
        entering: pool before, and index there, of the slots that enter it; None: there are none.
    """

    index: Tensor | None
    entering: tuple[Tensor, Tensor] | None


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
        self.keys: list[Held | None] = [None] * len(self.codecs)
        self.values: list[Held | None] = [None] * len(self.codecs)
        self.pools = torch.empty(0, dtype=torch.uint8)  # of compacted slots
        self._parts: list[_Told | None] = [None] * len(self.codecs)  # what `parts` said last

    def append(self, k: Tensor, v: Tensor, quantised: tuple[Tensor, Tensor] | None = None) -> None:
        """Add tokens `[B, H, M, D]` in 16 bits; `quantised` is for the dense store only."""
        self.dtype = k.dtype
        self._parts[-1] = None  # what is replaced is freed
        if self.n == 0:
            self.pools = self.pools.to(k.device)
        for which, (pools, x) in enumerate(((self.keys, k), (self.values, v))):
            (new,) = self.codecs[-1][which].encode(x, self.ran)
            old = pools[-1]
            pools[-1] = (new,) if old is None else (torch.cat([old[0], new], 2),)
        self.n += k.shape[2]
        self.residual += k.shape[2]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` in order of time, unpacked for one use."""
        order = self._order()
        return self._read(0, order), self._read(1, order)

    def _read(self, which: int, order: Tensor | None) -> Tensor:
        parts = [
            self.codecs[i][which].decode(x, self.dtype, self.ran, self.lead)
            for i, x in enumerate((self.keys, self.values)[which])
            if x is not None
        ]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        return whole if order is None else gather_kv.record(self.ran, whole, order)

    def _order(self) -> Tensor | None:
        """Where the slots, one pool after the other, lie in order of time; None if they do."""
        sizes = [0 if x is None else x[0].shape[2] for x in self.keys]
        sizes[-1] -= self.residual
        if sum(n > 0 for n in sizes) < 2:
            return None  # residual tokens follow the one pool there is
        return time_order.record(self.ran, self.slot_pools())

    def parts(self, dtype: torch.dtype, rotary: Rotary | None = None) -> list[Part]:
        """What is held, packed as it is, for `decode_attention`.

        With `rotary`, keys are those of slots that carry no angle: they are unpacked for one use
        and turned to their slot's index, `dtype`; values stay packed.
        """
        found = []
        pools = None if rotary is None else self.slot_pools()
        for i, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            if k is None or v is None:
                continue
            kc, vc = self.codecs[i]
            if rotary is None or pools is None:
                held, last = (k, v, self.lead), self._parts[i]
                if last is None or any(x is not y for x, y in zip(held, last[0], strict=True)):
                    part = Part(kc.packed(k, self.lead), vc.packed(v), kc.fmt, vc.fmt)
                    last = self._parts[i] = (held, part)
                found.append(last[1])
                continue
            n = k[0].shape[2]
            keys = kc.decode(k, dtype, self.ran, self.lead)
            keys = gather_kv.record(
                self.ran, keys, torch.arange(n, device=keys.device),
                by=first_of(pools == i, n), inv_freq=rotary.inv_freq.to(keys.device),
            )  # fmt: skip
            found.append(Part(keys, vc.packed(v), None, vc.fmt))
        return found

    def _forget_parts(self) -> None:
        """Let go of what `parts` said, so that replaced tensors are freed."""
        self._parts = [None] * len(self.codecs)

    def in_time(self, x: Tensor) -> Tensor:
        """Data `[B, H, N]` of the slots of `parts`, put into order of time."""
        order = self._order()
        return x if order is None else pick(x, order)

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` and move every slot into its pool, see `DenseStore.compact`."""
        self._forget_parts()
        if self.grouped:
            self._compact_groups(self.n if keep is None else keep.shape[-1])
            self.pools = pools
            return
        if keep is None:
            keep = torch.arange(self.n, device=self.device)
        if not self.tagged:
            pools = pools.reshape(-1, pools.shape[-1])[0]
        old, n = self.slot_pools(), keep.shape[-1]
        place = place_in_pool(old, len(self.codecs))
        moves: list[_Move | None] = []
        for i, count in enumerate(self.counts(n)):
            source = pick(keep, first_of(pools == i, count))
            moves.append(self._planned(i, source, old, place) if count else None)
        for which, held in enumerate((self.keys, self.values)):
            held[:] = [
                None if m is None else self._move(which, held, i, m) for i, m in enumerate(moves)
            ]
        self.n, self.residual = n, 0
        self.pools = pools.to(torch.uint8)

    def _compact_groups(self, n: int) -> None:
        """`compact` to `n` slots where keys share scales with their neighbours in time.

        Eviction is by age, so the oldest codes go; scales stay while any of their tokens does.
        """
        group, first = self.layer.policy.quantizer.group, self.layer.policy.fp16_sinks
        in_tier = 0 if self.keys[0] is None else self.keys[0][0].shape[2]
        left, new = entering(self.layer, self.n, n, in_tier)
        assert group is not None
        gone, self.lead = divmod(self.lead + in_tier - left, group) if left else (0, 0)
        for codec, pools in zip(self.codecs[0], (self.keys, self.values), strict=True):
            mine, native = pools[0], pools[-1]
            assert native is not None
            kept: Held | None = None
            if mine is not None and left:
                scales = gone if codec.along_tokens else in_tier - left
                kept = (mine[0][:, :, in_tier - left :], mine[1][:, :, scales:])
            if new:
                fresh = codec.encode(native[0][:, :, first : first + new], self.ran)
                both = [fresh] if kept is None else [kept, fresh]
                kept = tuple(torch.cat(x, 2) for x in zip(*both, strict=True))
                ends = (native[0][:, :, :first], native[0][:, :, first + new :])
                pools[-1] = (torch.cat(ends, 2),)
            pools[0] = kept
        self.n, self.residual = n, 0

    def counts(self, n: int) -> tuple[int, ...]:
        """Slots of each pool after a compaction left `n`: known to the host, so nothing waits."""
        tiers = self.layer.tier_counts(n)
        return (*tiers, n - sum(tiers))

    def _most_entering(self, enters: Tensor, i: int, held: list[Held | None]) -> int:
        """Most slots of any head that enter pool `i`; an upper bound where counting would wait."""
        if enters.device.type == "cpu":
            return int(enters.sum(-1).max())
        others = sum(h[0].shape[2] for j, h in enumerate(held) if j != i and h is not None)
        return min(enters.shape[-1], others)

    def _planned(self, i: int, source: Tensor, old: Tensor, place: Tensor) -> _Move:
        """What a compaction does to pool `i`, for keys and values alike.

        Args:
            i: the pool.
            source: slot before, of each slot after, `[n]` or `[B, V, n]`.
            old: pool of every slot before.
            place: its index there.
        """
        enters = pick(old, source) != i
        most = self._most_entering(enters, i, self.keys)  # heads may differ: some encode in vain
        mine = self.keys[i]
        size = 0 if mine is None else mine[0].shape[2]
        if most == 0 and size == source.shape[-1]:
            return _Move(None, None)
        index = pick(place, source)
        if most == 0:
            return _Move(index, None)
        slots = pick(source, first_of(enters, most))
        index = torch.where(enters, size + enters.cumsum(-1) - 1, index)
        return _Move(index, (pick(old, slots), pick(place, slots)))

    def _move(self, which: int, held: list[Held | None], i: int, move: _Move) -> Held:
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
        new = None if move.entering is None else self._enter(which, held, i, *move.entering)
        both = [x for x in (mine, new) if x is not None]
        joined = both[0] if len(both) == 1 else [torch.cat(x, 2) for x in zip(*both, strict=True)]
        return tuple(gather_kv.record(self.ran, x, move.index) for x in joined)

    def _enter(
        self, which: int, held: list[Held | None], i: int, old: Tensor, place: Tensor
    ) -> Held:
        """Slots that were at `place` of pools `old`, in the format of pool `i`."""
        codec = self.codecs[i][which]
        origins = [j for j, x in enumerate(held) if x is not None and j != i]
        values: Tensor | None = None
        for j in origins:
            rows, source = held[j], self.codecs[j][which]
            assert rows is not None
            at = place.clamp_max(rows[0].shape[2] - 1)  # of other pools' slots: any row will do
            if len(origins) == 1 and source.fmt is None:
                return codec.encode(rows[0], self.ran, at)
            rows = tuple(gather_kv.record(self.ran, x, at) for x in rows)
            x = source.decode(rows, self.dtype, self.ran)
            values = x if values is None else torch.where((old == j).unsqueeze(-1), x, values)
        assert values is not None
        return codec.encode(values, self.ran)

    def load(self, k: Tensor, v: Tensor, pools: Tensor, residual: int, lead: int = 0) -> None:
        """Start from 16-bit values `[B, H, N, D]`, see `Store.load`."""
        compacted = k.shape[2] - residual
        self._forget_parts()
        self.n = self.residual = self.lead = 0
        self.keys[:], self.values[:] = ([None] * len(self.codecs) for _ in range(2))
        self.pools = self.pools.new_empty(0)
        if compacted:
            self.append(k[:, :, :compacted], v[:, :, :compacted])
            self.compact(None, pools[..., : compacted - lead])
            if lead:
                self._compact_groups(self.n - lead)
        if residual:
            self.append(k[:, :, compacted:], v[:, :, compacted:])

    def hold(
        self, keys: list[Held | None], values: list[Held | None], n: int, pools: Tensor
    ) -> None:
        """Hold `n` compacted slots, given what is held of each pool and the pool of every slot."""
        self._forget_parts()
        self.keys[:], self.values[:] = keys, values
        if not self.tagged:
            pools = pools.reshape(-1, pools.shape[-1])[0]
        self.n, self.residual, self.pools = n, 0, pools.to(torch.uint8)

    def slot_pools(self) -> Tensor:
        """Pool of every slot."""
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
        self.keys = [None if h is None else tuple(t[rows] for t in h) for h in self.keys]
        self.values = [None if h is None else tuple(t[rows] for t in h) for h in self.values]
        if self.pools.dim() == 3 and self.pools.shape[0] > 1:
            self.pools = self.pools[rows]


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
