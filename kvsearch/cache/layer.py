"""One layer of a cache: what it knows of its stream, and the groups of KV heads that hold slots."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.call import Call
from kvsearch.cache.channels import View
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.projections import Output, Predictor
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.references import References
from kvsearch.policy import LayerLayout, ModelShape, Policy, layout
from kvsearch.policy.schedule import Clock
from kvsearch.policy.sequences import Sequences
from kvsearch_kernels.host_to_device import sent


class Layer:
    """One layer under a policy. Data only: `kvsearch.cache.ways` takes tokens in.

    Args:
        policy: of the whole cache.
        parts: the layer's integers, heads that are alike in one, in order.
        packed: hold real formats (deployment) instead of dense equal values (evaluation).
        native: the 16-bit type.
        rotary: how its keys are turned, needed when the policy re-indexes positions, or its rule
            reads queries.
        view: what it loses of the model's channels, or None.
        stream: tells which tokens are anchors, where the policy has such.
        output: its output projection, needed when the rule reads `outputs`.
        predictor: its map, needed when the rule reads `hidden`.
        fast: use the ways of fewer policies where they apply; off, all goes segment by segment.

    Attributes:
        groups: its KV heads, those that are alike in slots and tiers together.
        adaptive: whether heads share the layer's slots anew at every compaction.
        reindex: whether keys are turned to the place of their slot.
        impls: op -> the implementation of it that ran.
        seen: tokens of the stream so far.
        prompt: tokens of the first call, where the policy treats those in another way.
        whole: set where one call brings in a whole text of which nothing is kept, as in training:
            how many of its tokens are the prompt. None otherwise.
        expects: tokens of the prompt, where it may come in several calls, or with what follows it;
            None: it is the first call.
        rereads: whether the compaction after a prompt waits for the end of the model's call: what
            `rereading` does then.
        reading: slots whose turn it is in that reading; None outside of it.
        references: whom values are fitted to, from the second reading to the compaction.
        predicted: scores `[B, H, M]` fp32 that `predictor` gives the tokens of the next call.
        step: where its next token goes, see `decoding`.
        tables: what `decode_step` keeps of it on the device, from one step to the next.
    """

    def __init__(
        self, policy: Policy, parts: Sequence[LayerLayout], *, packed: bool,
        native: torch.dtype = torch.float16, rotary: Rotary | None = None,
        view: View | None = None, stream: Stream | None = None, output: Output | None = None,
        predictor: Predictor | None = None, fast: bool = True,
    ) -> None:  # fmt: skip
        self.policy, self.packed, self.native, self.fast = policy, packed, native, fast
        self.rotary, self.view, self.stream, self.predictor = rotary, view, stream, predictor
        self._clock = Clock(policy.interval if policy.compacts else None, policy.trigger)
        self.whole: int | None = None
        self.expects: int | None = None
        self.impls: dict[str, str] = {}
        self.groups = [
            HeadGroup(
                part, self.impls, packed=packed, native=native, output=output,
                rotary=rotary if view is None else view.rotary(rotary, part.heads),
            )
            for part in parts
        ]  # fmt: skip
        self._offset = _offset(policy, parts, view)
        self._share_offset()
        self.reindex = any(group.reindex for group in self.groups)
        self.adaptive = policy.budgets.kind == "adakv"
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.impls.clear()
        for group in self.groups:
            group.reset()
        self.seen = self.prompt = 0
        self.rereads = self.policy.rereads or self.policy.budgets.across == "model"
        self.reading: range | None = None
        self.references: list[References] = []
        self.predicted: Tensor | None = None
        self.step: Any = None
        self.tables: dict[str, Any] = {}
        self._inference = False  # whether the newest tokens came in torch's inference mode

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: a step has addresses."""
        return {**self.__dict__, "step": None, "tables": {}}

    def _share_offset(self) -> None:
        """Let the groups know the vectors of their heads."""
        for group in self.groups:
            if self._offset is not None and group.layout.policy.offset is not None:
                group.offset = self._offset[group.heads.start : group.heads.stop]

    def without_offset(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys `[B, Hq or H, M, D]` in which keys are held: the same attention."""
        if self._offset is None:
            return q, k
        stale = self._offset.is_inference() and not torch.is_inference_mode_enabled()
        if stale or self._offset.device != k.device:  # what was made in inference mode has no graph
            host = self._offset.to("cpu", copy=True).numpy()
            self._offset = sent(host, k.device)
            self._share_offset()
        if self._offset.shape[1] == 1:
            return q, (k - self._offset).to(k.dtype)
        offset, scales = self._offset.split(1, 1)
        each = scales.repeat_interleave(q.shape[1] // k.shape[1], 0)
        return (q * each).to(q.dtype), ((k - offset) / scales).to(k.dtype)

    @property
    def shared(self) -> list[Any]:
        """What copies of it have in common."""
        each: list[Any] = [x for g in self.groups for x in (g.layout, g.empty, g.rule, g.rotary)]
        each += [self._offset, *(g.offset for g in self.groups)]
        return [x for x in (self.policy, self.rotary, *each) if x is not None]

    def copied(self) -> "Layer":
        """One that goes on by itself."""
        return deepcopy(self, {id(x): x for x in self.shared})

    def reorder(self, rows: Tensor) -> None:
        """Select batch rows (beam search)."""
        for group in self.groups if self.seen else ():
            group.reorder(rows.to(group.store.device))

    # -- tokens --------------------------------------------------------------------------------

    def enter(self) -> None:
        """Get ready for tokens that come in torch's present mode.

        Tensors that were made in inference mode change in no other. `generate` is in another one,
        and may go on with what a loop in that mode has begun.
        """
        before, self._inference = self._inference, torch.is_inference_mode_enabled()
        if before and not self._inference:
            for group in self.groups:
                group.renew()
            self.step, self.tables = None, {}

    def begin(self, call: Call) -> None:
        """Get ready for the first tokens."""
        if self.policy.after_prompt:
            known = self.expects if self.whole is None else self.whole
            self.prompt = call.count if known is None else known
        for group in self.groups:
            group.begin(call.heads(group.heads), self.prompt)

    def each(self, call: Call, take: Callable[[HeadGroup, Call], Tensor]) -> Tensor:
        """Output `[B, Hq, M, Dv]` of all heads, of which `take` gives a group's part."""
        if len(self.groups) == 1:
            return take(self.groups[0], call)
        out = call.room()
        for group in self.groups:
            out[:, call.queries(group.heads)] = take(group, call.heads(group.heads))
        return out

    def next_compaction(self, seen: int) -> int | None:
        """After how many tokens, above `seen`, the layer is compacted; None if it is not."""
        return self._clock.after(seen, self.prompt)

    def compacts(self, seen: int) -> bool:
        """Whether the layer is compacted after `seen` tokens."""
        return self._clock.due(seen, self.prompt)

    def take_ahead(self, seen: int, most: int) -> int:
        """Hold the anchor flags of the tokens after `seen`, as many as attend alike; how many.

        A token that does not see earlier anchors (isolated, as in AnLLM) attends alone.
        """
        assert self.stream is not None
        flags, held = self.stream.flags(seen, most), self._sequences
        many = min(sequences.ahead(flags, most) for sequences in held)
        if many > 1 and any(sequences.isolated(flags[:many])[-1] for sequences in held):
            many -= 1
        for sequences in held:
            sequences.take(flags[:many])
        return many

    def hides(self) -> bool:
        """Whether there are slots that the next token does not see: earlier anchors."""
        if not any(sequences.anchor.any() for sequences in self._sequences):
            return False
        assert self.stream is not None
        flags = self.stream.flags(self.seen, 1)
        return any(sequences.isolated(flags)[0] for sequences in self._sequences)

    @property
    def _sequences(self) -> list[Sequences]:
        return [group.sequences for group in self.groups if group.sequences is not None]

    # -- what is held --------------------------------------------------------------------------

    @property
    def holds(self) -> bool:
        """Whether there are slots; a layer without attention never has any."""
        return any(group.store.n for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held."""
        return sum(group.nbytes for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that each group of the deployed layer held after any call, summed."""
        self.note_peak(self.seen)
        return sum(group.peak for group in self.groups)

    def note_peak(self, seen: int, groups: Sequence[HeadGroup] | None = None) -> None:
        """Remember the bytes held after `seen` tokens, in all groups or some, if they are the most.

        Keys of a prompt are activations until its compaction, see `Layout.bytes_peak`.
        """
        waits = self.policy.trigger != "stream" and seen <= self.prompt
        for group in self.groups if groups is None else groups:
            group.note_peak(activations=waits)


def empty_layers(
    policy: Policy, shape: ModelShape, rotaries: Sequence[Rotary | None] | None = None,
    lost: Sequence[View | None] | None = None, outputs: Sequence[Output | None] | None = None,
    predictors: Sequence[Predictor | None] | None = None, **options: Any,
) -> list[Layer]:  # fmt: skip
    """Layers that have seen nothing, shallow to deep.

    Args:
        policy: what they hold.
        shape: of the model.
        rotaries, lost, outputs, predictors: of each layer its rotary, view, output and predictor.
        options: of `Layer`.
    """
    parts: list[list[LayerLayout]] = [[] for _ in range(shape.layers)]
    for part in layout(policy, shape).layers:
        parts[part.layer].append(part)
    none = [None] * shape.layers
    own = zip(rotaries or none, lost or none, outputs or none, predictors or none, strict=True)
    return [
        Layer(policy, mine, rotary=turn, view=view, output=out, predictor=predicts, **options)
        for mine, (turn, view, out, predicts) in zip(parts, own, strict=True)
    ]


def _offset(policy: Policy, parts: Sequence[LayerLayout], view: View | None) -> Tensor | None:
    """What the keys of a layer are held without and divided by, `[H, 1 or 2, D]` fp16.

    None without an offset. Heads in 16 bits are left as they are.
    """
    if policy.offset is None or not parts or (view is not None and view.removed):
        return None
    vectors = policy.offset.heads(parts[0].layer, parts[-1].heads.stop)
    found = torch.tensor(vectors, device="cpu")
    for part in parts:
        if part.policy.offset is None:
            mine = found[part.heads.start : part.heads.stop]
            mine[:, 0], mine[:, 1:] = 0, 1
    return found if view is None else view.kept_keys(found.unsqueeze(0))[0]
