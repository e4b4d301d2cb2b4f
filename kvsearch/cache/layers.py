"""The layers of a cache under a policy, for whoever calls attention: transformers or a server.

The same code prefills, decodes and evaluates. A call brings any number of new tokens, and the
result does not depend on how a stream is cut into calls: that is what lets one forward pass over a
text replay a cache that was filled token by token. KV heads of a layer that are alike in slots and
tiers share a state, which attends alone.

In a left-padded batch every row has states of its own, and gives what it would give alone. Padding
comes in front of a prompt, in the first call of a batch of unequal prompts. Its tokens are never
taken in: each row's states see that row's own tokens, one row after the other, so that any policy
is exact, at the cost of the rows' products.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache import decoding, eviction, rereading
from kvsearch.cache.by_age import lifetimes
from kvsearch.cache.channels import View
from kvsearch.cache.general import adakv, segments, staging
from kvsearch.cache.model.projections import Output, Predictor
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.state import Call, LayerState
from kvsearch.errors import ModelError
from kvsearch.policy import ModelShape, Policy, layout

PIECE = 192  # tokens of a whole layer that are scanned at once: copies beside the cache


@dataclass(frozen=True)
class Layer:
    """What one layer holds of one stream.

    Attributes:
        states: of its KV heads; those that are alike share one.
        view: what it loses of the model's channels, or None.
    """

    states: Sequence[LayerState]
    view: View | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Take in new tokens and attend from them, see `advance`.

        What is deployed has no gradients, and so keeps no graph of the tokens that it holds.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.states[0].packed):
            if self.view is None:
                return advance(self.states, q, k, v, scale=scale, softcap=softcap)
            if self.view.removed:
                for state in self.states:
                    state.seen += q.shape[2]
                return v.new_zeros(*q.shape[:3], v.shape[3])
            out = advance(self.states, *self.view.kept(q, k, v), scale=scale, softcap=softcap)
            return self.view.whole(out, v.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held."""
        return sum(state.nbytes for state in self.states)


def empty_layers(
    policy: Policy,
    shape: ModelShape,
    rotaries: Sequence[Rotary | None],
    lost: Sequence[View | None],
    outputs: Sequence[Output | None] | None = None,
    predictors: Sequence[Predictor | None] | None = None,
    **options: Any,
) -> list[Layer]:
    """Layers that have seen nothing, shallow to deep.

    Args:
        policy: what they hold.
        shape: of the model.
        rotaries: the rotation of each layer's keys, where the policy needs it.
        lost: what each layer loses of its channels, see `channels.views`.
        outputs: the output projection of each layer, where the policy's rule reads it.
        predictors: the map of each layer, where the policy's rule predicts scores.
        options: of `LayerState`.
    """
    states: list[list[LayerState]] = [[] for _ in range(shape.layers)]
    for part in layout(policy, shape).layers:
        rotary, view = rotaries[part.layer], lost[part.layer]
        if view is not None:
            rotary = view.rotary(rotary, part.heads)
        output = None if outputs is None else outputs[part.layer]
        predictor = None if predictors is None else predictors[part.layer]
        states[part.layer].append(
            LayerState(part, rotary=rotary, output=output, predictor=predictor, **options)
        )
    return [Layer(mine, view) for mine, view in zip(states, lost, strict=True)]


# -- how tokens are taken in ----------------------------------------------------------------------


def advance(
    states: Sequence[LayerState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Take in new tokens in all heads of a layer and attend from them.

    Args:
        states: of the layer's heads, each KV head in one of them.
        q: queries `[B, Hq, M, D]`, rotated to their index in the stream.
        k: keys `[B, H, M, D]`, rotated likewise.
        v: values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, M, Dv]`.
    """
    call = Call(q, k, v, scale, softcap)
    for state in states:
        state.enter()
    if states[0].reading is not None:
        return rereading.attend(states, call)
    if states[0].rereads and states[0].seen:
        raise ModelError(
            "the prompt in this cache was not read again, as its policy's rule asks; call the "
            "cache's reset(), and then the model itself, as in model(ids, past_key_values=cache)"
        )
    if call.count == 1:
        found = decoding.advance(states, call)
        if found is not None:
            return found
    else:
        decoding.forget(states)
    if len(states) == 1:
        return alike(states[0], call)
    if states[0].layer.policy.budgets.kind == "adakv":
        return adakv.run(states, call)
    out, one = call.room(), call.count == 1
    for state in states:
        heads = state.layer.heads
        piece = PIECE * k.shape[1] // len(heads)  # copies of one kind of heads at a time
        out[:, call.queries(heads)] = alike(state, call.heads(heads), piece, compacts=not one)
    if one:  # all kinds of heads together
        segments.finish(states)
    return out


def alike(state: LayerState, call: Call, piece: int = PIECE, *, compacts: bool = True) -> Tensor:
    """`advance` in heads that share a state.

    Args:
        state: of the heads.
        call: what it brings to these.
        piece: tokens that a deployed layer scans at once.
        compacts: whether a compaction takes place where one is due; False, of one token, leaves
            it to the caller.
    """
    call = segments.arriving(state, call)
    if state.fast and call.count > 1 and lifetimes.serves(state, call.count):
        out = lifetimes.replay(state, call)
        state.note_peak()
        return out
    if not staging.applies(state, call):
        return _piecewise(state, call, compacts=compacts)
    with staging.staged(state, call):
        piece = max(piece, 2 * state.layer.policy.interval)
        parts = [slice(i, i + piece) for i in range(0, call.count, piece)]
        return torch.cat([_piecewise(state, call.tokens(x), compacts=compacts) for x in parts], 2)


def _piecewise(state: LayerState, call: Call, *, compacts: bool) -> Tensor:
    """From compaction to compaction, the fast ways where there are such."""
    if state.fast and eviction.serves(state, call.count):
        return eviction.run(state, call)
    return segments.run(state, call, compacts=compacts)


# -- left-padded batches -----------------------------------------------------------------------


@dataclass
class Rows:
    """One layer's states for each row of a batch.

    Attributes:
        padding: tokens in front of each row.
        states: of each row, as a layer has them that holds one sequence.
        view: what the layer loses of the model's channels, or None.
    """

    padding: list[int]
    states: list[Sequence[LayerState]]
    view: View | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """As `Layer.attend`, row by row; what padding attends to is 0."""
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for i, (skip, states) in enumerate(zip(self.padding, self.states, strict=True)):
            first = 0 if states[0].seen else skip
            own = (x[i : i + 1, :, first:] for x in (q, k, v))
            for state in states:
                if state.predicted is not None:  # of all rows and of the padding
                    seen, scores = state.predicted
                    state.predicted = seen, scores[i : i + 1, :, first:]
            layer = Layer(states, self.view)
            out[i : i + 1, :, first:] = layer.attend(*own, scale=scale, softcap=softcap)
        return out

    def reorder(self, rows: Sequence[int]) -> None:
        """Select rows, some of them several times."""
        self.padding = [self.padding[i] for i in rows]
        self.states = [copied(self.states[i]) for i in rows]

    @property
    def fullest(self) -> Sequence[LayerState]:
        """States of the row that holds most bytes."""
        return max(self.states, key=lambda states: sum(state.nbytes for state in states))


def copied(states: Sequence[LayerState]) -> Sequence[LayerState]:
    """States that go on by themselves."""
    same = [x for s in states for x in (s.layer, s.empty, s.rule, s.rotary) if x is not None]
    return [*deepcopy(states, {id(x): x for x in same})]


def left(shown: Tensor, rows: int, new: int) -> list[int] | None:
    """Tokens of padding in front of each row of a first call, or None if there are none.

    Args:
        shown: what the mask shows `[B, N]`, or `[B, 1, N, N]`.
        rows: of the batch.
        new: tokens of the call.
    """
    if len(shown) != rows or shown.shape[-1] != new:
        return None
    last = shown if shown.dim() == 2 else shown[:, 0, -1]
    padding: list[int] = (~last).sum(-1).tolist()
    if not any(padding) or max(padding) == new:
        return None
    causal = torch.ones(new, new, dtype=torch.bool, device=shown.device).tril()
    for skip, row in zip(padding, shown, strict=True):
        if shown.dim() == 2:
            plain = bool(row[skip:].all())
        else:
            own = row[0, skip:]
            plain = bool((own[:, skip:] == causal[skip:, skip:]).all() and not own[:, :skip].any())
        if not plain:
            return None
    return padding


def require_rows(rows: Rows, seen: int, ids: Tensor | None, states: Sequence[LayerState]) -> None:
    """Compare positions `[B, M]`, where they are handed over, with each row's own.

    Raises:
        ModelError: they count the padding, and the policy or its rule reads positions.
    """
    if all(state.rotary is None for state in states):
        return
    starts = torch.tensor([max(0, seen - skip) for skip in rows.padding])[:, None]
    if ids is not None and ids.dim() == 2 and len(ids) == len(starts):
        last = starts + ids.shape[1] - 1 - (0 if seen else torch.tensor(rows.padding)[:, None])
        if bool((ids[:, -1:].cpu() == last).all()):
            return
    raise ModelError(
        "this policy reads positions, and those of a padded batch must count each row's own "
        "tokens, as generate() has them; give position_ids, or prompts of equal length"
    )
