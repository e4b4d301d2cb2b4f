"""A deployed layer takes in many tokens as the evaluator does: dense, and packed again after them.

Between two compactions a packed layer would unpack all slots for one attention call, and encode
what moves after it. Here slots are unpacked once and kept dense while the tokens come, which is the
evaluator's own store, and so every replay of the evaluator serves. What must not be lost is where
a slot comes from: codes of slots that stay are moved as they are, since what is rounded a second
time is not the same. `StagedStore` follows that, and `packed` puts the layer back together.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.dense import DenseStore
from kvsearch.cache.slots.formats import Held
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.rules.base import pick
from kvsearch_kernels.picking import first_of, gather


def applies(layer: Layer, group: HeadGroup, call: Call) -> bool:
    """Whether a call reaches a second compaction of a deployed layer: staging pays."""
    if not (layer.fast and group.packed):
        return False
    if group.codecs[0][0].along_tokens:
        return False  # groups have scales, not slots; these policies go by age
    if len(group.codecs) > 2 and call.k.device.type != "cpu":
        return False  # codes of tokens that pass through tiers are picked on the host
    due = layer.next_compaction(call.seen)
    second = None if due is None else layer.next_compaction(due)
    return second is not None and call.end >= second


@contextmanager
def staged(layer: Layer, group: HeadGroup, call: Call) -> Iterator[None]:
    """Let heads of a deployed layer be dense for one call, in which a compaction is due."""
    store = group.store
    assert isinstance(store, PackedStore)
    group.store = dense = StagedStore(store, group, call.k)
    try:
        yield
    finally:
        group.store = store
        if group.rotary is not None:
            group.rotary.forget()
    dense.repack(call.k, call.v)
    layer.note_peak(call.end, [group])


class StagedStore(DenseStore):
    """Dense values of a packed store, and where each slot comes from.

    Attributes:
        origin: of every slot, `[N]` or `[B, V, N]`: its slot before, or the number of slots before
            plus the index of its token among the new ones.
        rows: with several tiers, where the codes of every slot are among those of its tier, in all
            heads `[B, H, N]`: first those held before, then those in `fresh`.
        fresh: codes made since, of each tier: keys and values.
    """

    room = 1.25  # it is memory beside a deployed cache

    def __init__(self, store: PackedStore, group: HeadGroup, k: Tensor) -> None:
        super().__init__(group.layout, group.native, group.impls)
        self.packed = store
        if store.n:
            self.k, self.v = (x.contiguous() for x in store.read())
            self.n, self.residual, self.pools = store.n, store.residual, store.slot_pools()
        self.origin = torch.arange(store.n, device=k.device)
        self.arrived = store.n
        self.tiered = len(self.codecs) > 2
        self.rounds |= self.tiered  # codes move between tiers of 16 bits, too
        self.fresh: list[tuple[list[Held], list[Held]]] = [([], []) for _ in self.codecs]
        if self.tiered:
            self.rows = _rows(store, k)
            ends = [0 if x is None else x[0].shape[:3].numel() for x in store.keys]
            self.ends = ends

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add tokens, see `DenseStore.append`."""
        super().append(k, v)
        self._arrive(k.shape[2])

    def _arrive(self, m: int) -> None:
        new = torch.arange(self.arrived, self.arrived + m, device=self.origin.device)
        self.origin = torch.cat([self.origin, new.expand(*self.origin.shape[:-1], m)], -1)
        self.arrived += m
        if self.tiered:
            self.rows = torch.nn.functional.pad(self.rows, (0, m))

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Drop all slots but `keep` and move the rest into `pools`, see `DenseStore.compact`."""
        if keep is not None:
            self.origin = pick(self.origin, keep)
            if self.tiered:
                self.rows = pick(self.rows, keep)
        super().compact(keep, pools)

    def hold(self, k: Tensor, v: Tensor, pools: Tensor, sources: Tensor, new: int) -> None:
        """Hold what is left after `new` tokens, see `DenseStore.hold`."""
        self._arrive(new)
        self.origin = pick(self.origin, sources)
        super().hold(k, v, pools, sources, new)

    def _move(self, changed: Tensor, pools: Tensor) -> None:
        """Store the `changed` of the first slots `[B, H, N]` in their `pools`, with codes."""
        if not self.tiered:
            super()._move(changed, pools)
            return
        assert self.k is not None and self.v is not None
        n, H, T = changed.shape[-1], changed.shape[1], self.k.shape[2]
        for i, codecs in enumerate(self.codecs[:-1]):
            b, h, slot = (changed & (pools == i)).nonzero().unbind(-1)
            if not len(slot):
                continue
            head = b * H + h
            for codec, dense, codes in zip(codecs, (self.k, self.v), self.fresh[i], strict=True):
                flat = dense.view(-1, dense.shape[3])
                x = flat.index_select(0, head * T + slot)
                new = codec.encode(x[None, None], self.packed.ran)
                flat.index_copy_(
                    0, head * T + slot, codec.decode(new, x.dtype, self.packed.ran)[0, 0]
                )
                codes.append(new)
            at = torch.arange(self.ends[i], self.ends[i] + len(slot), device="cpu")
            self.rows.view(-1).index_copy_(0, head * n + slot, at)
            self.ends[i] += len(slot)

    def repack(self, k: Tensor, v: Tensor) -> None:
        """Give the packed store what is held, see `staged`."""
        compacted, m = self.n - self.residual, k.shape[2] - self.residual
        pools = self.pools[..., :compacted]
        if self.tiered:
            self._assemble(compacted, pools)
        else:
            self.packed.append(k[:, :, :m], v[:, :, :m])
            self.packed.compact(self.origin[..., :compacted], pools)
        if self.residual:
            self.packed.append(k[:, :, m:], v[:, :, m:])

    def _assemble(self, n: int, pools: Tensor) -> None:
        """Fill the packed store with the first `n` slots, whose codes are known."""
        assert self.k is not None and self.v is not None
        heads, counts = self.k.shape[:2], self.packed.counts(n)
        found: tuple[list[Held | None], list[Held | None]] = ([], [])
        for i, count in enumerate(counts):
            slots = first_of(pools == i, count)
            rows = pick(self.rows[..., :n], slots).flatten()
            for which, (dense, old) in enumerate(
                ((self.k, self.packed.keys[i]), (self.v, self.packed.values[i]))
            ):
                if not count:
                    found[which].append(None)
                elif i == len(counts) - 1:
                    kept = gather(dense, slots)
                    found[which].append(self.codecs[i][which].encode(kept, self.packed.ran))
                else:
                    tables = [x for x in (old, *self.fresh[i][which]) if x is not None]
                    found[which].append(
                        tuple(
                            torch.cat([x.flatten(0, 2) for x in same])
                            .index_select(0, rows)
                            .view(*heads, count, -1)
                            for same in zip(*tables, strict=True)
                        )
                    )
        self.packed.hold(*found, n, pools)


def _rows(store: PackedStore, k: Tensor) -> Tensor:
    """Where the codes of every slot are among those of its pool in all heads, `[B, H, N]`."""
    B, H = k.shape[:2]
    pools, order = store.slot_pools().long(), store.order(store.n)
    sizes = torch.tensor([0 if x is None else x[0].shape[2] for x in store.keys], device="cpu")
    heads = torch.arange(B * H, device=k.device).view(B, H, 1)
    place = torch.arange(store.n, device=k.device) if order is None else order
    return place - (sizes.cumsum(0) - sizes)[pools] + heads * sizes[pools]
