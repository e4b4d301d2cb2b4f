"""The attention function behind the name `kvsearch`: a policy layer's, or SDPA for everything else.

A cache layer marks the keys it returns with itself; the function finds the mark and lets the layer
attend over what it holds. What a policy layer would silently get wrong is refused here.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsearch.cache.state import LayerState
from kvsearch.errors import ModelError

NAME = "kvsearch"
MARK = "kvsearch_layer"
_PLAIN = "kvsearch_plain"
_BEYOND = {  # what a model may ask of attention that a policy layer does not do
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sliding_window": "a sliding window that its config does not name",
    "cu_seq_lens_q": "packed sequences",
}


class Attending(Protocol):
    """A cache layer that attends over its own slots."""

    state: LayerState
    waits: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Take in new tokens and attend from them, as `engine.advance` does."""


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """SDPA's mask: policy layers only look for padding in it, other layers need it."""
    made: Tensor | None = sdpa_mask(*args, **kwargs)
    return made


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through the policy layer that marked `key`, or through SDPA if none did."""
    layer: Attending | None = getattr(key, MARK, None)
    if layer is None:
        if softcap is not None:
            return _softcapped(query, key, value, attention_mask, scaling, softcap)
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    layer.waits = False
    kwargs.setdefault("is_causal", getattr(module, "is_causal", None))
    _refuse(layer.state, query, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(query, key, value, scale=scale, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _refuse(state: LayerState, query: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> None:
    """Say what a policy layer would otherwise silently get wrong."""
    for name, what in _BEYOND.items():
        if extra.get(name) is not None:
            raise ModelError(f"models with {what} are not supported by a policy cache")
    if extra.get("is_causal") is False:
        raise ModelError("models whose attention is not causal are not supported by a policy cache")
    if mask is not None and not getattr(mask, _PLAIN, False):
        m, n = query.shape[2], state.seen + query.shape[2]
        plain = torch.ones(m, n, dtype=torch.bool, device=mask.device).tril(n - m)
        seen = mask if mask.dtype == torch.bool else mask == 0
        if seen.shape[-2:] != plain.shape or not bool((seen == plain).all()):
            raise ModelError(
                "a policy cache attends to all earlier tokens, and this mask hides some or shows "
                "later ones: padded batches are not supported; give prompts of equal length"
            )
        setattr(mask, _PLAIN, True)  # all layers of one call are given the same mask
    ids = extra.get("position_ids")
    cheap = query.shape[2] > 1 or query.device.type == "cpu"  # one look costs a GPU a wait
    checked = getattr(ids, _PLAIN, None) == state.seen  # all layers of a call share the positions
    if state.reindex and ids is not None and cheap and not checked:
        want = torch.arange(state.seen, state.seen + query.shape[2], device=ids.device)
        if not bool((ids == want).all()):
            raise ModelError(
                f"positions 'cache' counts tokens from the start of the stream: expected position "
                f"{state.seen} for the next token, got {int(ids.flatten()[0])}"
            )
        setattr(ids, _PLAIN, state.seen)


def _softcapped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
) -> tuple[Tensor, None]:
    """Plain attention with bounded products, which SDPA cannot do (Gemma 2's windowed layers)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    s = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    s = softcap * torch.tanh(s / softcap)
    n, m = key.shape[2], query.shape[2]
    if mask is None:
        mask = torch.ones(m, n, dtype=torch.bool, device=s.device).tril(n - m)
    low = torch.finfo(s.dtype).min  # not -inf: a row of padding sees nothing and must stay finite
    s = s.masked_fill(~mask, low) if mask.dtype == torch.bool else s + mask
    p = s.softmax(-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(value.dtype)
    return (p @ value).transpose(1, 2).contiguous(), None
