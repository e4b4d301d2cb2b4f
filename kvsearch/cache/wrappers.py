"""Wrappers around the attention functions of transformers.

A cache layer marks the keys it returns with itself. Models ask transformers' `AttentionInterface`
for a function by the name in their config; what they are given is wrapped, once a process: it looks
for the mark and lets the layer attend over what it holds, or else calls the function that was asked
for. So nothing of a model is changed. What a policy layer would silently get wrong is refused here.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface
from transformers.utils import output_capturing

from kvsearch.cache import padded
from kvsearch.cache.generate_inputs import again
from kvsearch.cache.layer import Layer
from kvsearch.cache.padded import PaddedBatch
from kvsearch.errors import ModelError
from kvsearch.models.shape import require_angles, shape_of, text_config

MARK = "kvsearch_layer"
_PLAIN = "kvsearch_plain"  # on masks and positions: the last call that looked at them
_PADDING = "kvsearch_padding"  # on masks: that call, and the padding of each row
_BEYOND = {  # what a model may ask of attention that a policy layer does not do
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "cu_seq_lens_q": "packed sequences",
}


class Attending(Protocol):
    """A cache layer that attends over its own slots."""

    held: Layer
    waits: bool
    config: Any
    padded: PaddedBatch | None
    switch: tuple[str, int] | None
    call: int

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Take in new tokens and attend from them, as `ways.advance` does."""


def route() -> None:
    """Let every attention function that a model asks for look for marked keys first."""
    plain = AttentionInterface.get_interface
    if hasattr(plain, MARK):
        return

    @wraps(plain)
    def get_interface(self: Any, name: Any, default: Any) -> Callable[..., Any]:
        return partial(attention, plain(self, name, default))

    setattr(get_interface, MARK, True)
    AttentionInterface.get_interface = get_interface


def attention(
    plain: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Attend through the policy layer that marked `key`, or through `plain` if none did."""
    layer: Attending | None = getattr(key, MARK, None)
    if layer is None:
        return plain(module, query, key, *args, **kwargs)
    return _attend(layer, module, query, key, *args, **kwargs)


def _attend(
    layer: Attending,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer.waits = False
    if (config := getattr(module, "config", None)) is not layer.config:
        _refuse_other(layer, config)
    kwargs.setdefault("is_causal", getattr(module, "is_causal", None))
    _refuse_maps(kwargs)
    _refuse_window(layer, query, config, kwargs.get("sliding_window"))
    _refuse(layer, query, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(query, key, value, scale=scale, softcap=softcap)
    if layer.padded is not None:
        layer.held.seen += query.shape[2]  # padding included, as transformers counts
    return out.transpose(1, 2).contiguous(), None


def _refuse_other(layer: Attending, config: Any) -> None:
    """Refuse a model whose layers have another shape or other angles than the cache's own."""
    if config is None:
        return
    if layer.config is not None and _kind(config) != _kind(layer.config):
        raise ModelError(
            "this cache was made for another model, with layers of another shape or other "
            "rotary angles; make one with PolicyCache(policy, model)"
        )
    layer.config = config


def _kind(config: Any) -> tuple[object, ...]:
    """What a cache relies on of a model."""
    text = text_config(config)
    return shape_of(config), text.model_type, getattr(text, "rope_parameters", None)


def _refuse_maps(extra: dict[str, Any]) -> None:
    """Refuse a call that is to return attention maps: no layer makes any of what was evicted."""
    collector = getattr(output_capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    if "attentions" in collected if collected is not None else extra.get("output_attentions"):
        raise ModelError(
            "a policy cache has no attention maps to return; call the model without "
            "output_attentions, or without the cache"
        )


def _refuse_window(layer: Attending, query: Tensor, config: Any, window: int | None) -> None:
    """Refuse a window that hides tokens, and leave alone one that is as long as the positions."""
    if window is None:
        return
    reach = getattr(config, "max_position_embeddings", None)
    if not reach or window < reach:
        raise ModelError(
            "models with a sliding window that its config does not name are not supported by a "
            "policy cache"
        )
    if layer.held.seen + query.shape[2] > window:
        raise ModelError(
            f"the model's sliding window of {window} tokens would hide some, and a policy cache "
            f"attends to all: stay within its {reach} positions"
        )


def _looked_at(layer: Attending, x: Any) -> bool:
    """Whether a layer before in the same call looked at a mask or positions that all are given.

    In a later call the same tensor may hold something else.
    """
    return bool(layer.call) and getattr(x, _PLAIN, 0) == layer.call


def _pad(layer: Attending, query: Tensor, mask: Tensor | None, ids: Tensor | None) -> bool:
    """Whether rows of the batch are padded in front; from their first call on the layer knows."""
    held, seen, n = layer.held, layer.held.seen, layer.held.seen + query.shape[2]
    plain = bool(held.groups) and held.stream is None  # a layer that holds, and no anchors
    plain = plain and not held.rereads  # its second reading takes rows of equal length
    if plain and layer.padded is None and not seen and mask is not None:
        call, found = getattr(mask, _PADDING, (0, None))
        if not call or call != layer.call:
            shown = _shown(mask, query, n)
            found = None if shown is None else padded.left(shown, len(query), n)
            setattr(mask, _PADDING, (layer.call, found))
        if found is not None:
            layer.padded = PaddedBatch(found, [held.copied() for _ in found])
    if layer.padded is None:
        return False
    if seen and mask is not None and (shown := _shown(mask, query, n)) is not None:
        newest = shown if shown.dim() == 2 else shown[:, 0, -1]
        if len(newest) != len(query) or (~newest).sum(-1).tolist() != layer.padded.padding:
            raise ModelError(
                "the attention mask of this call hides other tokens than the padding of the first "
                "one; give one that has grown by the tokens of the call"
            )
    padded.require_rows(layer.padded, held, ids)
    return True


def _refuse(layer: Attending, query: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> None:
    """Say what a policy layer would otherwise silently get wrong."""
    held = layer.held
    for name, what in _BEYOND.items():
        if extra.get(name) is not None:
            raise ModelError(f"models with {what} are not supported by a policy cache")
    if extra.get("is_causal") is False:
        raise ModelError("models whose attention is not causal are not supported by a policy cache")
    ids, skipped = extra.get("position_ids"), 0
    has_rows = _pad(layer, query, mask, ids)
    if layer.padded is not None:
        skipped = min(layer.padded.padding)
    require_angles(layer.switch, max(0, held.seen - skipped), held.seen + query.shape[2] - skipped)
    if has_rows:
        return
    if held.seen:  # padding is refused at the first tokens
        _compare(layer, query, ids)
    if mask is not None and not _looked_at(layer, mask):
        _refuse_hidden(held, query, mask)
        setattr(mask, _PLAIN, layer.call)
    if not held.seen:
        _compare(layer, query, ids)


def _refuse_hidden(held: Layer, query: Tensor, mask: Tensor | BlockMask) -> None:
    """Refuse a mask, of whatever attention function, that is not the causal one."""
    m, n = query.shape[2], held.seen + query.shape[2]
    shown = _shown(mask, query, n)
    if shown is None:
        return
    if shown.dim() == 2:  # flash attention's, of the tokens so far
        plain = torch.ones(n, dtype=torch.bool, device=shown.device)
    else:
        plain = torch.ones(m, n, dtype=torch.bool, device=shown.device).tril(n - m)
    if shown.shape[-plain.dim() :] == plain.shape and bool((shown == plain).all()):
        return
    newest = shown[..., -1] if shown.dim() == 2 else shown[..., -1, -1]
    if held.seen and (shown.shape[-1] < n or not bool(newest.all())):
        raise ModelError(
            f"the attention mask of this call has no columns for all of the {held.seen} tokens "
            f"that the cache has seen and the {m} of the call; give one for all of them, or none, "
            "and if the call repeats tokens, call the cache's reset() before it"
        )
    raise ModelError(
        "a policy cache attends to all earlier tokens, and this mask hides some or shows "
        "later ones: a batch may be padded in front of its prompts only, and not under a policy "
        "with anchors or a second reading of the prompt; give prompts of equal length"
    )


def _shown(mask: Tensor | BlockMask, query: Tensor, n: int) -> Tensor | None:
    """What a mask shows, as booleans; None where it costs too much to look at a single token's.

    Of eager and flex attention these are made whether or not they hide anything, and what hides
    something hid it from the prompt.
    """
    m = query.shape[2]
    if isinstance(mask, BlockMask):
        return None if m == 1 else create_mask(mask.mask_mod, len(query), 1, m, n, query.device)
    if mask.dtype == torch.bool or mask.dim() == 2:
        return mask.bool()
    return mask == 0 if m > 1 or mask.is_cpu else None


def _compare(layer: Attending, query: Tensor, ids: Tensor | None) -> None:
    """Compare positions `[B or 1, M]`, where the model hands them over, with what was seen."""
    held, m, seen = layer.held, query.shape[2], layer.held.seen
    cheap = m > 1 or query.device.type == "cpu"  # one look costs a GPU a wait
    if ids is None or ids.dim() != 2 or not cheap or not (seen or held.reindex or layer.switch):
        return
    if _looked_at(layer, ids):
        return
    first = int(ids[:, 0].min())
    if first < seen:
        raise ModelError(
            f"by its positions {again(seen, first, m)}; and if these are the next tokens, give "
            f"position_ids from {seen} on"
        )
    if layer.switch is not None and (last := int(ids.max()) + 1) != seen + m:
        kind, most = layer.switch
        if max(last, seen + m) > most:
            raise ModelError(
                f"the model turns its keys by other angles after position {most - 1} (rope type "
                f"{kind!r}), and positions of this call end at {last - 1}, those of its tokens at "
                f"{seen + m - 1}; give position_ids that count the tokens, or none"
            )
    if held.reindex:
        want = torch.arange(seen, seen + m, device=ids.device)
        if not bool((ids == want).all()):
            raise ModelError(
                f"positions 'cache' counts tokens from the start of the stream: expected position "
                f"{seen} for the next token, got {first}"
            )
    setattr(ids, _PLAIN, layer.call)
