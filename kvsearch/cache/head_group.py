"""KV heads of a layer that are alike in slots and tiers: their store, and their rule's scorer."""

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from kvsearch.cache.call import Call
from kvsearch.cache.model.projections import Output
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.slots.dense import DenseStore
from kvsearch.cache.slots.formats import codecs, straight
from kvsearch.cache.slots.packed import PackedStore, Store
from kvsearch.policy import LayerLayout
from kvsearch.policy.budgets import require_prompt
from kvsearch.policy.sequences import Sequences
from kvsearch.rules import Place, Scorer, Slots
from kvsearch.rules.attention import require_scannable


class HeadGroup:
    """Neighbouring KV heads of one layer, which share a store and are compacted alike.

    What their layer knows for all of its groups, as how many tokens came, is in `Layer`.

    Args:
        layout: their integers.
        impls: of their layer.
        packed, native, rotary, output: as of `Layer`.
        offset: vectors `[H, 1 or 2, D]`: what their keys are held without, and divided by; None
            without any.

    Attributes:
        heads: which KV heads of the layer they are.
        needs: what the rule reads; nothing without an active one.
        layout: their integers; with trigger `generation` those after the prompt, from that on.
        empty: their integers before the first token.
        store: keys and values of their slots.
        scorer: what the policy's rule knows of the slots; None before the first token, or without
            an active rule.
        sequences: what the slots hold, where there are anchors; None before the first token.
        cursor: first slot that the ladder's present pass has not thinned.
        unfitted: heads, over all sequences, that kept their values where `refit` was asked for.
        peak: most bytes per sequence that were held in real formats when `note_peak` was called.
        impls: op -> the implementation of it that ran; the layer's.
    """

    def __init__(
        self, layout: LayerLayout, impls: dict[str, str], *, packed: bool, native: torch.dtype,
        rotary: Rotary | None = None, output: Output | None = None, offset: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.empty, self.impls, self.native = layout, impls, native
        self.rotary, self.output, self.offset = rotary, output, offset
        self.codecs, self.rule = codecs(layout, native), layout.policy.active_rule
        self.reindex = layout.policy.drops and layout.policy.positions == "cache"
        self.heads, self.needs = layout.heads, frozenset(self.rule.needs if self.rule else ())
        self._kind = PackedStore if packed else DenseStore
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.layout = self.empty
        self.store = self._new_store()
        self.scorer: Scorer | None = None
        self.sequences: Sequences | None = None
        self.cursor = self.peak = self.unfitted = 0

    def _new_store(self) -> Store:
        return self._kind(self.layout, self.native, self.impls)

    @property
    def packed(self) -> bool:
        """Whether slots are in real formats now."""
        return isinstance(self.store, PackedStore)

    def begin(self, call: Call, prompt: int) -> None:
        """Get ready for the first tokens, of which the first `prompt` are treated as one."""
        policy, q, k = self.layout.policy, call.q, call.k
        if policy.after_prompt:
            require_prompt(policy, self.layout.slots, prompt)
            self.layout = self.empty.after(prompt)
            if self.layout is not self.empty:
                self.store = self._new_store()
        if policy.anchors is not None:
            self.sequences = Sequences(self.layout.policy, prompt)
        if self.rule is not None:
            rotary = self.rotary
            self.scorer = self.rule.scorer(Place(
                heads=q.shape[1], kv_heads=k.shape[1], head_dim=k.shape[3],
                interval=policy.interval, batch=q.shape[0], device=q.device,
                inv_freq=None if rotary is None else rotary.inv_freq.to(q.device),
                layer=self.layout.layer, first_head=self.heads.start,
                output=None if self.output is None else self.output.norms(self.heads),
            ))  # fmt: skip
            require_scannable(self.rule, self.scorer)

    def arriving(self, call: Call) -> Call:
        """A call as it is taken in: rounded, and turned back if positions are re-indexed."""
        q, k, v = call.q, call.k, call.v
        if self.reindex:
            q, k = self.unturned(call.seen, q, k)
        k, v = (straight(x.to(self.native).to(x.dtype), x) for x in (k, v))
        return replace(call, q=q, k=k, v=v)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots `[B, H, N, D]`, keys turned to their slot if re-indexed."""
        keys, values = self.store.read()
        return self.turned(keys, 0), values

    def unturned(self, seen: int, *xs: Tensor) -> list[Tensor]:
        """Queries, or keys, of tokens after `seen` as they were before the model turned them."""
        assert self.rotary is not None
        stop, device = seen + xs[0].shape[2], xs[0].device
        index = torch.arange(seen, stop, device=device, dtype=torch.float32)
        return self.rotary.undo(index, *xs)

    def turned(self, x: Tensor, first: int) -> Tensor:
        """Keys or queries `[B, H, M, D]` as of slots from `first` on, if these are re-indexed."""
        if not self.reindex:
            return x
        assert self.rotary is not None
        return self.rotary.turn_slots(x, first, keep=not self.packed)

    def ranks(self, seen: int) -> Tensor | None:
        """What the rule thinks of each slot after `seen` tokens `[B, V, N]`; None without one."""
        if self.scorer is None:
            return None
        n, target, policy = self.store.n, self.layout.target, self.layout.policy
        return self.scorer.ranks(Slots(
            seen=seen, count=n, position=n if self.reindex else seen,
            recent_from=n - policy.recent_window, read=self._whole, sinks=policy.sinks,
            stay=target if n > (target or 0) else None,
        ))  # fmt: skip

    def _whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots as rules know them: with what keys are held without."""
        keys, values = self.read()
        if self.offset is None:
            return keys, values
        offset, *scales = self.offset.split(1, 1)
        for each in scales:
            keys = keys * each
        return (keys + offset).to(values.dtype), values

    def unscaled(self, q: Tensor) -> Tensor:
        """Queries `[B, Hq, M, D]` as the model gave them."""
        if self.offset is None or self.offset.shape[1] == 1:
            return q
        each = self.offset[:, 1:].repeat_interleave(q.shape[1] // len(self.heads), 0)
        return (q / each).to(q.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held for these heads."""
        more = sum(x.nbytes for x in (self.scorer, self.offset) if x is not None)
        return self.store.nbytes + more

    def note_peak(self, *, activations: bool) -> None:
        """Remember the bytes held now, before something takes their place, if they are the most.

        With `activations`, what no compaction has seen is a prompt's, see `Layout.bytes_peak`.
        """
        if self.packed and not (activations and self.store.residual):
            self.peak = max(self.peak, self.nbytes)

    def pack(self) -> "HeadGroup":
        """A deployed copy of what an evaluation holds: the same slots in real formats.

        Values were rounded already, so low-bit tiers may be rounded once more; bytes are exact.
        """
        other = HeadGroup(
            self.layout,
            self.impls,
            packed=True,
            native=self.native,
            rotary=self.rotary,
            offset=self.offset,
        )  # packing is part of what an evaluation measures
        if self.store.n:
            k, v = self.store.read()
            other.store.load(k, v, self.store.slot_pools(), self.store.residual)
        other.scorer, other.sequences, other.cursor = self.scorer, self.sequences, self.cursor
        return other

    def renew(self) -> None:
        """Copy all tensors."""
        same = {id(x): x for x in (self.layout, self.impls)}
        self.store, self.scorer = deepcopy((self.store, self.scorer), same)

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.store.reorder(rows)
        if self.scorer is not None:
            self.scorer.reorder(rows)
