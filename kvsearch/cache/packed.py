"""The store of deployment: every pool holds packed codes and scales, and nothing else."""

import torch
from torch import Tensor

from kvsearch.cache.formats import Codec, codecs
from kvsearch.cache.store import gather, gather_flat
from kvsearch.policy import LayerLayout

Held = tuple[Tensor, ...]


class PackedStore:
    """Slots of one layer in their real formats; the same interface as `DenseStore`.

    Each pool keeps its tokens in order of time. Where a slot's tier follows from its order, nothing
    more is held; where it follows from scores, one tag byte per slot is.
    """

    def __init__(self, layer: LayerLayout, native: torch.dtype) -> None:
        self.codecs = codecs(layer, native)
        self.raw_pool = len(self.codecs) - 1
        self.tagged = layer.policy.tagged
        self.n = self.raw = 0
        self.dtype = torch.float32
        self.keys: list[Held | None] = [None] * len(self.codecs)
        self.values: list[Held | None] = [None] * len(self.codecs)
        self.raw_keys: Tensor | None = None
        self.raw_values: Tensor | None = None
        self.pools = torch.empty(0, dtype=torch.uint8)  # of ticked slots; `[n - raw]` or per head

    def append(self, k: Tensor, v: Tensor, settled: tuple[Tensor, Tensor] | None = None) -> None:
        """Add tokens `[B, H, M, D]` in 16 bits; `settled` is for the dense store only."""
        self.dtype = k.dtype
        (k16,), (v16,) = (c.encode(x) for c, x in zip(self.codecs[-1], (k, v), strict=True))
        self.raw_keys = k16 if self.raw_keys is None else torch.cat([self.raw_keys, k16], 2)
        self.raw_values = v16 if self.raw_values is None else torch.cat([self.raw_values, v16], 2)
        self.n += k.shape[2]
        self.raw += k.shape[2]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` in order of time, unpacked for one use."""
        return self._read(self.keys, self.raw_keys, 0), self._read(self.values, self.raw_values, 1)

    def _read(self, held: list[Held | None], raw: Tensor | None, which: int) -> Tensor:
        parts = [
            self.codecs[i][which].decode(x, self.dtype) for i, x in enumerate(held) if x is not None
        ]
        ticked = torch.cat(parts, 2) if len(parts) > 1 else (parts[0] if parts else None)
        if ticked is not None and len(parts) > 1:  # pools one after the other -> order of time
            by_pool = self.pools.long().argsort(dim=-1, stable=True)
            ticked = gather(ticked, by_pool.argsort(-1))
        if raw is None:
            assert ticked is not None
            return ticked
        raw = raw.to(self.dtype)
        return raw if ticked is None else torch.cat([ticked, raw], 2)

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` and move every slot into its pool, see `DenseStore.compact`."""
        k, v = self.read()
        if keep is None:
            keep = torch.arange(self.n, device=k.device)
        if not self.tagged:
            pools = pools.reshape(-1, pools.shape[-1])[0]
        old = self.slot_pools()
        place = _place_in_pool(old, len(self.codecs))
        new_keys: list[Held | None] = []
        new_values: list[Held | None] = []
        for i, (kc, vc) in enumerate(self.codecs):
            count = int((pools == i).sum(-1).flatten()[0])
            if count == 0:
                new_keys.append(None)
                new_values.append(None)
                continue
            slots = (pools != i).long().argsort(dim=-1, stable=True)[..., :count]
            source = gather_flat(keep, slots)
            stays = gather_flat(old, source) == i
            where = gather_flat(place, source)
            raw16 = i == self.raw_pool
            new_keys.append(_move(self.keys[i], k, kc, source, stays, where, raw16))
            new_values.append(_move(self.values[i], v, vc, source, stays, where, raw16))
        self.keys, self.values = new_keys, new_values
        self.n, self.raw, self.raw_keys, self.raw_values = keep.shape[-1], 0, None, None
        self.pools = pools.to(torch.uint8)

    def load(self, k: Tensor, v: Tensor, pools: Tensor, raw: int) -> None:
        """Start from 16-bit values `[B, H, N, D]`, see `DenseStore.load`."""
        ticked = k.shape[2] - raw
        self.n = self.raw = 0
        self.raw_keys = self.raw_values = None
        if ticked:
            self.append(k[:, :, :ticked], v[:, :, :ticked])
            self.compact(None, pools[..., :ticked])
        if raw:
            self.append(k[:, :, ticked:], v[:, :, ticked:])

    def slot_pools(self) -> Tensor:
        """Pool of every slot."""
        fresh = self.pools.new_full((*self.pools.shape[:-1], self.raw), self.raw_pool)
        return torch.cat([self.pools, fresh], -1).to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        held = [t for pool in self.keys if pool is not None for t in pool]
        first = self.raw_keys if self.raw_keys is not None else (held[0] if held else None)
        return torch.device("cpu") if first is None else first.device

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of all tensors held."""
        held = [t for pool in (*self.keys, *self.values) if pool is not None for t in pool]
        held += [t for t in (self.raw_keys, self.raw_values) if t is not None]
        if not held:
            return 0
        total = sum(t.nbytes for t in held) // held[0].shape[0]
        if self.tagged:  # tags of one sequence; layer-wide votes share one row
            total += self.pools.nbytes // max(1, self.pools.shape[0])
        return total

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.keys = [None if h is None else tuple(t[rows] for t in h) for h in self.keys]
        self.values = [None if h is None else tuple(t[rows] for t in h) for h in self.values]
        if self.raw_keys is not None and self.raw_values is not None:
            self.raw_keys, self.raw_values = self.raw_keys[rows], self.raw_values[rows]
        if self.pools.dim() == 3 and self.pools.shape[0] > 1:
            self.pools = self.pools[rows]


def _place_in_pool(pools: Tensor, kinds: int) -> Tensor:
    """Index of each slot among the slots of its pool, same shape as `pools`."""
    place = torch.zeros(pools.shape, dtype=torch.long, device=pools.device)
    for i in range(kinds):
        mine = pools == i
        place = torch.where(mine, mine.cumsum(-1) - 1, place)
    return place


def _move(
    held: Held | None,
    values: Tensor,
    codec: Codec,
    source: Tensor,
    stays: Tensor,
    where: Tensor,
    raw16: bool,
) -> Held:
    """Contents of one pool after a compaction: what stays is moved, what enters is encoded."""
    entering = codec.encode(gather(values, source))
    if held is None or raw16:
        return entering  # 16-bit values come back bit for bit, so moving is encoding again
    return tuple(
        torch.where(stays.unsqueeze(-1), gather(old, where.clamp_max(old.shape[2] - 1)), new)
        for old, new in zip(held, entering, strict=True)
    )
