"""The store of evaluation: dense values that are exactly what the packed store reads back.

Slots are in order of time. A slot's pool is its tier, or `residual` (the last pool) while it is in
16 bits, which new tokens and fp16 sinks are.
"""

import torch
from torch import Tensor

from kvsearch.cache.slots.formats import Ran, codecs, entering
from kvsearch.policy import LayerLayout
from kvsearch.rules.base import pick
from kvsearch_kernels.picking import gather


class DenseStore:
    """Slots of one layer as dense tensors in the model's type.

    Attributes:
        n: tokens held.
        residual: newest tokens that no compaction has seen.
        pools: pool of every slot, `[N]` or per head `[B, H, N]`, uint8.
        room: by how much the tensors grow when they are full.
        ran: op -> the implementation of it that ran.
    """

    room = 2.0

    def __init__(self, layer: LayerLayout, native: torch.dtype, ran: Ran) -> None:
        self.codecs, self.ran = codecs(layer, native), ran
        self.residual_pool = len(self.codecs) - 1
        self.layer, self.rounds = layer, layer.policy.quantizes
        self.grouped, self.in_tier = self.codecs[0][0].along_tokens, 0
        self.n = self.residual = 0
        self.k: Tensor | None = None
        self.v: Tensor | None = None
        self.pools = torch.empty(0, dtype=torch.uint8, device="cpu")

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens `[B, H, M, D]`, already rounded to 16 bits."""
        m = k.shape[2]
        self._reserve(k, v, self.n + m)
        assert self.k is not None and self.v is not None
        self.k[:, :, self.n : self.n + m] = k
        self.v[:, :, self.n : self.n + m] = v
        if self.n == 0:
            self.pools = self.pools.to(k.device)
        self.pools = torch.constant_pad_nd(self.pools, (0, m), self.residual_pool)
        self.n += m
        self.residual += m

    def _reserve(self, k: Tensor, v: Tensor, n: int) -> None:
        if self.k is not None and self.v is not None and self.k.shape[2] >= n:
            return
        size = max(n, 64) if self.k is None else max(n, int(self.room * self.k.shape[2]))
        old, new = (self.k, self.v), [x.new_empty(*x.shape[:2], size, x.shape[3]) for x in (k, v)]
        for held, x in zip(old, new, strict=True):
            if held is not None:
                x[:, :, : self.n] = held[:, :, : self.n]
        self.k, self.v = new

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, N, D]` in order of time."""
        assert self.k is not None and self.v is not None
        return self.k[:, :, : self.n], self.v[:, :, : self.n]

    def release(self) -> tuple[Tensor, Tensor]:
        """`read`, for a caller that will `hold` what comes after; until then nothing is held."""
        found = self.read()
        self.k = self.v = None
        return found

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep`, then move every slot into its pool.

        Args:
            keep: rising slot indices `[N]` or `[B, H, N]`; None keeps all.
            pools: pool of every kept slot, `[N]` or `[B, H, N]`.
        """
        assert self.k is not None and self.v is not None
        old, n = self.pools, pools.shape[-1]
        if keep is not None:
            n, old = keep.shape[-1], pick(old, keep)
            for held in (self.k, self.v):
                held[:, :, :n] = gather(held, keep)
        if self.grouped:
            self._quantise_groups(n)
        elif self.rounds:
            self._move((old != pools).expand(*self.k.shape[:2], n), pools)
        self.n, self.residual, self.pools = n, 0, pools

    def _move(self, changed: Tensor, pools: Tensor) -> None:
        """Store the `changed` of the first slots `[B, H, N]` in their `pools`."""
        assert self.k is not None and self.v is not None
        T = self.k.shape[2]
        for i, (kc, vc) in enumerate(self.codecs[:-1]):
            mine = changed & (pools == i)
            if self.k.device.type != "cpu":  # counting what changed would wait
                for held, codec in zip((self.k, self.v), (kc, vc), strict=True):
                    x = held[:, :, : changed.shape[-1]]
                    x.copy_(torch.where(mine.unsqueeze(-1), codec.read_back(x, self.ran), x))
                continue
            b, h, slot = mine.nonzero().unbind(-1)
            rows = (b * self.k.shape[1] + h) * T + slot
            keys, values = (x.view(1, 1, -1, x.shape[3]) for x in (self.k, self.v))
            k, v = keys.index_select(2, rows), values.index_select(2, rows)
            if kc == vc and k.shape == v.shape:
                k, v = kc.read_back(torch.stack((k, v)), self.ran)
            else:
                k, v = kc.read_back(k, self.ran), vc.read_back(v, self.ran)
            keys.index_copy_(2, rows, k)
            values.index_copy_(2, rows, v)

    def rewrite(self, side: int, x: Tensor) -> None:
        """Let compacted slots have other keys (side 0) or values (1) `[B, H, N, D]`, as their pools
        read them back."""
        whole = (self.k, self.v)[side]
        assert whole is not None
        held = whole[:, :, : self.n]
        for i, codec in enumerate(both[side] for both in self.codecs):
            mine = (self.pools == i).expand(held.shape[:3]).unsqueeze(-1)
            held.copy_(torch.where(mine, codec.read_back(x, self.ran), held))

    def _quantise_groups(self, n: int) -> None:
        """Quantise what enters the tier, whose keys share scales with their neighbours in time."""
        left, new = entering(self.layer, self.n, n, self.in_tier)
        assert self.k is not None and self.v is not None
        end = n - min(n, self.layer.policy.fp16_recent)
        for held, codec in zip((self.k, self.v), self.codecs[0], strict=True):
            if new:
                held[:, :, end - new : end] = codec.read_back(held[:, :, end - new : end], self.ran)
        self.in_tier = left + new

    def load(self, k: Tensor, v: Tensor, pools: Tensor, residual: int, lead: int = 0) -> None:
        """Start from 16-bit values `[B, H, lead + N, D]`; the last `residual` are residual.

        The `lead` tokens after the 16-bit sinks are gone already; they are given because the first
        tokens that are held share their scales.
        """
        if self.grouped:
            first = self.layer.policy.fp16_sinks
            self.in_tier = self.layer.tier_counts(k.shape[2] - residual - lead)[0]
            part = slice(first, first + lead + self.in_tier)
            k, v = k.clone(), v.clone()
            for held, codec in zip((k, v), self.codecs[0], strict=True):
                if self.in_tier:
                    held[:, :, part] = codec.read_back(held[:, :, part], self.ran)
            k, v = (torch.cat([x[:, :, :first], x[:, :, first + lead :]], 2) for x in (k, v))
        self.n, self.residual, self.pools = k.shape[2], residual, pools
        self.k, self.v = k.contiguous(), v.contiguous()
        if self.rounds and not self.grouped:
            own = {"memory_format": torch.contiguous_format}
            self.k, self.v = k.clone(**own), v.clone(**own)
            self._move((pools != self.residual_pool).expand(k.shape[:3]), pools)

    def hold(self, k: Tensor, v: Tensor, pools: Tensor, sources: Tensor, new: int) -> None:
        """Hold compacted slots `[B, H, N, D]` whose values are those of their pools already.

        `sources` `[B, V, N]`: where they are among the slots before and then the `new` tokens.
        """
        self.k, self.v = k.contiguous(), v.contiguous()
        self.n, self.residual, self.pools = k.shape[2], 0, pools

    def slot_pools(self) -> Tensor:
        """Pool of every slot, `[N]` or `[B, V, N]` uint8; the last pool is 16 bits."""
        return self.pools

    @property
    def device(self) -> torch.device:
        """Where the slots are."""
        return torch.device("cpu") if self.k is None else self.k.device

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of the dense values; not what the policy costs."""
        if self.k is None or self.v is None:
            return 0
        return sum(x[0, :, : self.n].nbytes for x in (self.k, self.v))

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[rows], self.v[rows]
            if self.pools.dim() == 3 and self.pools.shape[0] > 1:
                self.pools = self.pools[rows]
