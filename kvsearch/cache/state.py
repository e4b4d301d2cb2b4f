"""One layer's cache as it runs: the same code prefills, decodes and evaluates.

`LayerState.advance` takes any number of new tokens, and the result does not depend on how a
stream is cut into calls: that is what lets one forward pass over a text replay a cache that was
filled token by token.
"""

from typing import Any

import torch
from torch import Tensor

from kvsearch.cache import lifetimes, scan
from kvsearch.cache.book import ScoreBook
from kvsearch.cache.compaction import compact
from kvsearch.cache.decode import decode
from kvsearch.cache.dense import DenseStore
from kvsearch.cache.formats import codecs
from kvsearch.cache.packed import PackedStore
from kvsearch.cache.rotary import Rotary
from kvsearch.cache.store import Store
from kvsearch.policy import LayerLayout
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 512  # queries per attention map, so that a long prompt needs no T x T memory


class LayerState:
    """Cache of one layer.

    Args:
        layer: its integers.
        packed: hold real formats (deployment) instead of dense equal values (evaluation).
        native: the 16-bit type; tests may pass float32 to compare with an unmodified model.
        rotary: needed when the policy re-indexes positions.
        fast: use the one-pass replays where they apply; off, everything goes segment by segment.
    """

    def __init__(
        self,
        layer: LayerLayout,
        *,
        packed: bool,
        native: torch.dtype = torch.float16,
        rotary: Rotary | None = None,
        fast: bool = True,
    ) -> None:
        self.layer, self.native, self.rotary, self.fast = layer, native, rotary, fast
        self.packed, self.codecs = packed, codecs(layer, native)
        self.reindex = layer.policy.evicts and layer.policy.positions == "cache"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.impls: dict[str, str] = {}
        self.store: Store = DenseStore(self.layer, self.native)
        if self.packed:
            self.store = PackedStore(self.layer, self.native, self.impls)
        self.book: ScoreBook | None = None
        self.seen = self.cursor = self.prompt = 0
        self.peak_bytes = 0

    def advance(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Take in new tokens and attend from them.

        Args:
            q: queries `[B, Hq, M, D]`, rotated to their index in the stream.
            k: keys `[B, H, M, D]`, rotated likewise.
            v: values `[B, H, M, D]`.
            scale: factor on the dot products.
            softcap: bound of the scaled products, if the model has one.

        Returns:
            Attention output `[B, Hq, M, D]`.
        """
        m, p = q.shape[2], self.layer.policy
        if self.seen == 0 and p.trigger != "stream":
            self.prompt = m
        if p.scored and self.book is None:
            self.book = ScoreBook(self.layer, q.shape[0], q.device)
        if self.reindex:
            assert self.rotary is not None
            index = torch.arange(self.seen, self.seen + m, device=q.device)
            q, k = self.rotary.undo(q, index), self.rotary.undo(k, index)
        k, v = k.to(self.native).to(k.dtype), v.to(self.native).to(v.dtype)
        if self.fast and self.seen == 0 and m > 1 and lifetimes.applies(p):
            return lifetimes.prefill(self, q, k, v, scale=scale, softcap=softcap)
        if self.fast and scan.applies(self, m):
            return scan.run(self, q, k, v, scale=scale, softcap=softcap)
        return self.segments(q, k, v, self.quantise_ahead(k, v), scale=scale, softcap=softcap)

    def segments(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        quantised: tuple[Tensor, Tensor] | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> Tensor:
        """Take in tokens piece by piece, compacting where a compaction is due; serves every policy.

        Arguments are as in `advance`, after rounding; `quantised` is from `quantise_ahead`.
        """
        out = torch.empty_like(q)
        done, total = 0, q.shape[2]
        while done < total:
            end = self.layer.next_compaction(self.seen, self.prompt)
            left = total - done if end is None else min(end - self.seen, total - done)
            part = slice(done, done + min(left, ROWS))
            ready = None if quantised is None else (quantised[0][:, :, part], quantised[1][:, :, part])
            self.store.append(k[:, :, part], v[:, :, part], ready)
            out[:, :, part] = self._attend(q[:, :, part], end, scale, softcap)
            done = part.stop
            self.seen += part.stop - part.start
            self._record_peak()
            if self.seen == end:
                self.cursor = compact(self.layer, self.store, self.book, self.seen, self.cursor)
                self._record_peak()
        return out

    def _record_peak(self) -> None:
        """Keys of a prompt are activations until its compaction, see `Layout.bytes_peak`."""
        compacted_prompt = self.store.residual == 0 or self.seen > self.prompt
        if self.packed and compacted_prompt:
            self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def quantise_ahead(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Quantise a whole call at once when there is one tier; the store then only copies."""
        p = self.layer.policy
        if self.packed or len(p.tiers) > 1 or not p.quantizes:
            return None
        kc, vc = self.codecs[0]
        quantised = kc.fake(k), vc.fake(v)
        sinks = slice(0, max(0, p.fp16_sinks - self.seen))
        for quantised, residual in zip(quantised, (k, v), strict=True):
            quantised[:, :, sinks] = residual[:, :, sinks]
        return quantised

    def _attend(self, q: Tensor, end: int | None, scale: float, softcap: float | None) -> Tensor:
        """Attend from the newest tokens, which the store already holds."""
        if self.packed and q.shape[2] == 1:
            return decode(self, q, end, scale=scale, softcap=softcap)
        keys, values = self.store.read()
        n, m = keys.shape[2], q.shape[2]
        slots = torch.arange(n, device=q.device)
        if self.reindex:
            assert self.rotary is not None
            keys, q = self.rotary.turn_slots(keys, 0), self.rotary.turn_slots(q, n - m)
        if self.book is None:
            born = (slots - (n - m)).clamp_min(0)
            never = torch.full_like(slots, m)
            return self.lifetime(
                q, keys, values, born, never, first_query=0, scale=scale, softcap=softcap
            )[0]
        rows = torch.arange(m, device=q.device)
        last = self.seen + m if end is None else end
        weights = self.book.row_weights(n - m + rows + 1, last - self.seen - 1 - rows)
        out, received = scored_attention.record(
            self.impls, q, keys, values, weights, scale=scale, softcap=softcap
        )
        self.book.add(received, self.seen, m)
        return out

    def lifetime(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """`lifetime_attention`, and note which implementation ran."""
        return lifetime_attention.record(self.impls, *args, **kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held for this layer."""
        return self.store.nbytes + (0 if self.book is None else self.book.nbytes)

    def pack(self) -> "LayerState":
        """A deployed copy of an evaluated state: the same slots in real formats.

        Values were rounded already, so low-bit tiers may be rounded once more; bytes are exact.
        """
        other = LayerState(self.layer, packed=True, native=self.native, rotary=self.rotary)
        k, v = self.store.read()
        other.store.load(k, v, self.store.slot_pools(), self.store.residual)
        other.book, other.seen = self.book, self.seen
        other.cursor, other.prompt = self.cursor, self.prompt
        self.impls |= other.impls  # packing is part of what an evaluation measures
        return other

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.store.reorder(rows)
        if self.book is not None:
            self.book.reorder(rows)
