"""What one layer's cache holds. Data only: `kvsearch.cache.ways` acts on it."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.projections import Output, Predictor
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.slots.dense import DenseStore
from kvsearch.cache.slots.formats import codecs
from kvsearch.cache.slots.packed import PackedStore, Store
from kvsearch.policy import LayerLayout
from kvsearch.policy.budgets import require_prompt
from kvsearch.policy.sequences import Sequences
from kvsearch.rules import Place, Scorer, Slots
from kvsearch.rules.attention import require_scannable


@dataclass(frozen=True)
class Call:
    """What a call of attention brings to some heads of a layer.

    Attributes:
        q: queries of the new tokens `[B, Hq, M, D]`.
        k: their keys `[B, H, M, D]`.
        v: their values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None

    @property
    def count(self) -> int:
        """How many tokens there are."""
        return self.q.shape[2]

    @property
    def how(self) -> dict[str, Any]:
        """What an op is told of the products."""
        return {"scale": self.scale, "softcap": self.softcap}

    def tokens(self, part: slice) -> "Call":
        """Some of the tokens."""
        q, k, v = (x[:, :, part] for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def queries(self, heads: range) -> slice:
        """Query heads of some KV heads."""
        group = self.q.shape[1] // self.k.shape[1]
        return slice(heads.start * group, heads.stop * group)

    def heads(self, heads: range) -> "Call":
        """The part of some KV heads."""
        mine = slice(heads.start, heads.stop)
        q = self.q[:, self.queries(heads)]
        return replace(self, q=q, k=self.k[:, mine], v=self.v[:, mine])

    def room(self) -> Tensor:
        """Memory for the output `[B, Hq, M, Dv]`."""
        return self.q.new_empty(*self.q.shape[:3], self.v.shape[3])


class LayerState:
    """Cache of one layer.

    Args:
        layer: its integers.
        packed: hold real formats (deployment) instead of dense equal values (evaluation).
        native: the 16-bit type; tests may pass float32 to compare with an unmodified model.
        rotary: needed when the policy re-indexes positions, or its rule reads queries.
        fast: use the one-pass replays where they apply; off, everything goes segment by segment.
        stream: tells which tokens are anchors, where the policy has such.
        output: the layer's output projection, needed when the rule reads `outputs`.
        predictor: the layer's map, needed when the rule reads `hidden`.

    Attributes:
        layer: its integers; with trigger `generation` those after the prompt, from that on.
        empty: its integers before the first token.
        store: keys and values.
        scorer: what the policy's rule knows of the slots; None before the first token, or without
            an active rule.
        seen: tokens of the stream so far.
        cursor: first slot that the ladder's present pass has not thinned.
        sequences: what the slots hold, where there are anchors; None before the first token.
        prompt: tokens of the first call, where the policy treats those in another way.
        whole: set where one call brings in a whole text of which nothing is kept, as in training:
            how many of its tokens are the prompt. None otherwise.
        rereads: whether the compaction after a prompt waits for the end of the model's call: what
            `rereading` does then.
        reading: slots whose turn it is in that reading; None outside of it. See `rereading`.
        predicted: how many tokens came before those of the newest call, and what `predictor` says
            of these `[B, H, M]`; None without one.
        impls: op -> the implementation of it that ran.
        step: where the layer's next tokens go, in the first of its states; see `decoding`.
        tables: what `decode_step` keeps of the layer on the device, from one step to the next.
    """

    def __init__(
        self,
        layer: LayerLayout,
        *,
        packed: bool,
        native: torch.dtype = torch.float16,
        rotary: Rotary | None = None,
        fast: bool = True,
        stream: Stream | None = None,
        output: Output | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.empty, self.predictor = layer, predictor
        self.native, self.rotary, self.fast = native, rotary, fast
        self.stream, self.output = stream, output
        self.whole: int | None = None
        self.packed, self.codecs = packed, codecs(layer, native)
        self.rule = layer.policy.active_rule
        self.reindex = layer.policy.drops and layer.policy.positions == "cache"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.layer = self.empty
        self.impls: dict[str, str] = {}
        self.step: Any = None
        self.tables: dict[str, Any] = {}
        self.store = self._new_store()
        self.scorer: Scorer | None = None
        self.sequences: Sequences | None = None
        self.seen = self.cursor = self.prompt = 0
        self.rereads = self.rule is not None and (
            "rereading" in self.rule.needs or self.layer.policy.budgets.across == "model"
        )
        self.reading: range | None = None
        self.predicted: tuple[int, Tensor] | None = None
        self._peak = 0
        self._inference = False  # whether the newest tokens came in torch's inference mode

    def _new_store(self) -> Store:
        kind = PackedStore if self.packed else DenseStore
        return kind(self.layer, self.native, self.impls)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: a step has addresses."""
        return {**self.__dict__, "step": None, "tables": {}}

    def enter(self) -> None:
        """Get ready for tokens that come in torch's present mode.

        Tensors that were made in inference mode change in no other. `generate` is in another one,
        and may go on with what a loop in that mode has begun.
        """
        before, self._inference = self._inference, torch.is_inference_mode_enabled()
        if before and not self._inference:
            same = {id(x): x for x in (self.layer, self.impls)}
            self.store, self.scorer = deepcopy((self.store, self.scorer), same)
            self.step, self.tables = None, {}

    def begin(self, call: Call) -> None:
        """Get ready for the first tokens."""
        q, k = call.q, call.k
        if self.layer.policy.prompted:
            self.prompt = q.shape[2] if self.whole is None else self.whole
            require_prompt(self.layer.policy, self.layer.slots, self.prompt)
            self.layer = self.empty.after(self.prompt)
            if self.layer is not self.empty:
                self.store = self._new_store()
        if self.stream is not None:
            self.sequences = Sequences(self.layer.policy, self.prompt)
        if self.rule is not None:
            rotary = self.rotary
            self.scorer = self.rule.scorer(
                Place(
                    heads=q.shape[1],
                    kv_heads=k.shape[1],
                    head_dim=k.shape[3],
                    interval=self.layer.policy.interval,
                    batch=q.shape[0],
                    device=q.device,
                    inv_freq=None if rotary is None else rotary.inv_freq.to(q.device),
                    layer=self.layer.layer,
                    first_head=self.layer.heads.start,
                    output=None if self.output is None else self.output.norms(self.layer.heads),
                )
            )
            require_scannable(self.rule, self.scorer)

    def foreseen(self, count: int) -> Tensor | None:
        """What is predicted of the next `count` tokens `[B, H, count]` fp32, where anything is."""
        if self.predicted is None:
            return None
        first, scores = self.predicted
        return scores[..., self.seen - first : self.seen - first + count]

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots `[B, H, N, D]`, keys turned to their slot if re-indexed."""
        keys, values = self.store.read()
        return self.turned(keys, 0), values

    def unturned(self, *xs: Tensor) -> list[Tensor]:
        """Queries, or keys, of the next tokens as they were before the model turned them."""
        assert self.rotary is not None
        stop, device = self.seen + xs[0].shape[2], xs[0].device
        index = torch.arange(self.seen, stop, device=device, dtype=torch.float32)
        return self.rotary.undo(index, *xs)

    def turned(self, x: Tensor, first: int) -> Tensor:
        """Keys or queries `[B, H, M, D]` as of slots from `first` on, if these are re-indexed."""
        if not self.reindex:
            return x
        assert self.rotary is not None
        return self.rotary.turn_slots(x, first, keep=not self.packed)

    def slots(self) -> Slots:
        """What is held now, for the scorer to look at."""
        n, target = self.store.n, self.layer.target
        return Slots(
            seen=self.seen,
            count=n,
            position=n if self.reindex else self.seen,
            recent_from=n - self.layer.policy.recent_window,
            read=self.read,
            sinks=self.layer.policy.sinks,
            stay=target if n > (target or 0) else None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held for this layer."""
        return self.store.nbytes + (0 if self.scorer is None else self.scorer.nbytes)

    def note_peak(self) -> None:
        """Remember the bytes held now, before something takes their place, if they are the most.

        Keys of a prompt are activations until its compaction, see `Layout.bytes_peak`.
        """
        waits = self.layer.policy.trigger != "stream" and self.seen <= self.prompt
        if self.packed and (self.store.residual == 0 or not waits):
            self._peak = max(self._peak, self.nbytes)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that the packed layer held at any step."""
        self.note_peak()
        return self._peak

    def pack(self) -> "LayerState":
        """A deployed copy of an evaluated state: the same slots in real formats.

        Values were rounded already, so low-bit tiers may be rounded once more; bytes are exact.
        """
        other = LayerState(self.layer, packed=True, native=self.native, rotary=self.rotary)
        if self.store.n:
            k, v = self.store.read()
            other.store.load(k, v, self.store.slot_pools(), self.store.residual)
        other.scorer, other.seen = self.scorer, self.seen
        other.stream, other.sequences = self.stream, self.sequences
        other.cursor, other.prompt = self.cursor, self.prompt
        self.impls |= other.impls  # packing is part of what an evaluation measures
        return other

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        self.store.reorder(rows)
        if self.scorer is not None:
            self.scorer.reorder(rows)
