"""Which way new tokens take into a layer, for whoever calls attention: transformers or a server.

The same code prefills, decodes and evaluates. A call brings any number of new tokens, and the
result does not depend on how a stream is cut into calls: that is what lets one forward pass over a
text replay a cache that was filled token by token.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsearch.cache import by_attention_sum, decoding, rereading
from kvsearch.cache.by_age import lifetimes
from kvsearch.cache.by_segment import segments
from kvsearch.cache.call import Call
from kvsearch.cache.layer import Layer
from kvsearch.errors import ModelError, PolicyError


class Way(Protocol):
    """A module that takes tokens in."""

    def serves(self, layer: Layer, call: Call) -> bool:
        """Whether it can take in the tokens of a call."""

    def run(self, layer: Layer, call: Call) -> Tensor:
        """Take them in: attend `[B, Hq, M, Dv]`, hold what stays, count them as seen."""


BY_SEGMENT: Way = segments  # serves all
CAPPED = (
    "field quantizer.offset: this model bounds its attention scores (softcap), and an offset would "
    "change them; remove quantizer.offset from the policy"
)
WAYS: Sequence[Way] = (decoding, by_attention_sum, lifetimes, BY_SEGMENT)  # the first that serves


def advance(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
) -> Tensor:
    """Take in new tokens in all heads of a layer and attend from them.

    What is deployed has no gradients, and so keeps no graph of the tokens that it holds.

    Args:
        layer: what it holds changes.
        q: queries `[B, Hq, M, D]`, rotated to their index in the stream.
        k: keys `[B, H, M, D]`, rotated likewise.
        v: values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, M, Dv]`.

    Raises:
        PolicyError: several sequences come to heads that share slots, and would differ in number.
        ModelError: a prompt was to be read again and was not.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not layer.packed):
        view, width = layer.view, v.shape[3]
        if view is not None and view.removed:
            layer.seen += q.shape[2]
            return v.new_zeros(*q.shape[:3], width)
        if view is not None:
            q, k, v = view.kept(q, k, v)
        if softcap is not None and layer.policy.offset is not None:
            raise ModelError(CAPPED)
        predicted, layer.predicted = layer.predicted, None
        q, k = layer.without_offset(q, k)
        out = _take_in(layer, Call(q, k, v, scale, softcap, layer.seen, predicted))
        return out if view is None else view.whole(out, width)


def advance_together(
    layers: Sequence[Layer], q: Tensor, k: Tensor, v: Tensor, memo: dict[str, Any], *,
    scale: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """`advance` by a token each of several sequences, whose layers are deployed: the same results.

    Where one op decodes a token of each, it is called once for all of them.

    Args:
        layers: one of each sequence, all the same layer of a model.
        q, k, v: as `advance` has them, `[R, H, 1, D]`, a row for each of `layers`.
        memo: empty at first; the same for every token of this layer of the model.
        scale, softcap: as `advance` has them.

    Returns:
        Attention output `[R, Hq, 1, Dv]`.
    """
    how: dict[str, Any] = {"scale": scale, "softcap": softcap}
    view = layers[0].view
    together = len(layers) > 1 and (view is None or not view.removed)
    with torch.no_grad():
        if together:
            kept = (q, k, v) if view is None else view.kept(q, k, v)
            mine = layers[0].without_offset(*kept[:2])
            call = Call(*mine, kept[2], **how)
            for i, layer in enumerate(layers):
                layer.enter()
                together = together and _decodes(layer, call.row(i, layer.seen))
            out = decoding.run_together(layers, call, memo) if together else None
            if out is not None:
                return out if view is None else view.whole(out, v.shape[3])
        each = (x.split(1) for x in (q, k, v))
        parts = zip(layers, *each, strict=True)
        return torch.cat([advance(layer, *row, **how) for layer, *row in parts])


def _decodes(layer: Layer, call: Call) -> bool:
    """Whether one op takes in a token of a layer that has begun."""
    if not layer.seen or not layer.fast or layer.rereads or layer.predictor is not None:
        return False
    return decoding.serves(layer, call)


def _take_in(layer: Layer, call: Call) -> Tensor:
    """`advance` with the channels that the layer has."""
    if layer.adaptive and len(call.q) > 1:
        raise PolicyError("budgets 'adakv' serve one sequence at a time: batches are not supported")
    layer.enter()
    if layer.reading is not None:
        return rereading.attend(layer, call)
    if layer.rereads and call.seen:
        raise ModelError(
            "the prompt in this cache was not read again, as its policy's rule asks; call the "
            "cache's reset(), and then the model itself, as in model(ids, past_key_values=cache)"
        )
    if not call.seen:
        layer.begin(call)
    if call.count > 1:
        decoding.forget(layer)
    ways = WAYS if layer.fast else (BY_SEGMENT,)
    return next(way for way in ways if way.serves(layer, call)).run(layer, call)
