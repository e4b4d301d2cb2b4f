"""`PolicyCache`: a policy as a Hugging Face cache. The only file that imports their interface.

transformers hands new keys and values to a cache layer, and the result to an attention function
chosen by name. Our layer returns the new keys marked with itself; our attention function finds
the mark and lets the layer attend over what it holds. Unmarked calls (other caches, sliding-window
layers) go to SDPA untouched.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvsearch.cache.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.errors import ModelError, PolicyError
from kvsearch.models.shape import policy_layers, rotary_frequencies, shape_of
from kvsearch.policy import Policy, layout

NAME = "kvsearch"
_MARK = "kvsearch_state"


class PolicyLayer(CacheLayerMixin):
    """One layer's slots under a policy. `keys` and `values` stay empty: the state holds them."""

    is_sliding = False
    is_croppable = False

    def __init__(self, state: LayerState) -> None:
        super().__init__()
        self.state = state

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys with this layer; they are stored when attention runs."""
        self.is_initialized = True
        marked = key_states.view_as(key_states)
        setattr(marked, _MARK, self.state)
        return marked, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Lengths for a mask, as if nothing had been evicted."""
        return self.state.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens seen, which is what positions follow from; held are `state.store.n`."""
        return self.state.seen

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state.reset()
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows (beam search)."""
        if self.state.seen:
            self.state.reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what was evicted cannot be brought back."""
        if tokens_to_remove:
            raise PolicyError("a policy cache cannot be rolled back: evicted tokens are gone")


class PolicyCache(Cache):
    """A cache that really holds what a policy says; goes into `model.generate(past_key_values=)`.

    Layers with full attention follow the policy; sliding-window and linear-attention layers keep
    the cache that transformers gives them. The model's attention implementation is set to ours,
    which serves every other cache through SDPA as before.

    Args:
        policy: what to hold.
        model: the model that will use the cache.
        packed: hold real formats; False holds equal dense values, for evaluation.
        native: 16-bit storage type; by default the model's type, or fp16 for an fp32 model.
        fast: use one-pass replays for many tokens at once.

    Raises:
        PolicyError: the model's shape cannot run the policy.
        ModelError: the model cannot be served (no re-indexable RoPE where the policy asks for it).
    """

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel,
        *,
        packed: bool = True,
        native: torch.dtype | None = None,
        fast: bool = True,
    ) -> None:
        shape = shape_of(model.config)
        policy.check(shape)
        install(model)
        rotary = None
        if policy.evicts and policy.positions == "cache":
            rotary = Rotary(rotary_frequencies(model))
        if native is None:
            native = model.dtype if model.dtype in (torch.float16, torch.bfloat16) else torch.float16
        layers = list(DynamicCache(config=model.config).layers)
        plain = DynamicLayer  # exactly this class: its subclasses have caches of their own
        held = policy_layers(model.config)
        if [i for i, layer in enumerate(layers) if type(layer) is plain] != list(held):
            raise ModelError("this transformers release builds another cache for the model's layers")
        for i, integers in zip(held, layout(policy, shape).layers, strict=True):
            state = LayerState(
                integers, packed=packed, native=native, rotary=rotary, fast=fast
            )
            layers[i] = PolicyLayer(state)
        super().__init__(layers=layers)
        self.policy = policy
        self.shape = shape

    @classmethod
    def from_json(
        cls, source: str | os.PathLike[str], model: PreTrainedModel, **options: Any
    ) -> "PolicyCache":
        """Read a policy file and build its cache for `model`."""
        return cls(Policy.from_json(source), model, **options)

    @property
    def states(self) -> list[LayerState]:
        """States of the layers that follow the policy, shallow to deep."""
        return [layer.state for layer in self.layers if isinstance(layer, PolicyLayer)]

    @property
    def bytes_resident(self) -> int:
        """Bytes per sequence that the policy's layers hold now, summed over real tensors."""
        return sum(state.nbytes for state in self.states)

    @property
    def bytes_peak_resident(self) -> int:
        """Largest sum over layers of the most bytes each layer held at any step so far."""
        return sum(state.peak_bytes for state in self.states)


def full_cache(model: PreTrainedModel) -> Cache:
    """The unmodified full cache of `model`, to compare with."""
    return DynamicCache(config=model.config)


def install(model: PreTrainedModel) -> None:
    """Let `model` attend through policy caches; every other cache keeps working."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    if model.config._attn_implementation != NAME:
        try:
            model.set_attn_implementation(NAME)
        except ValueError as e:
            raise ModelError(f"{type(model).__name__} has no attention interface: {e}") from e


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """SDPA's mask: policy layers only look for padding in it, other layers need it."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    state: LayerState | None = getattr(key, _MARK, None)
    if state is None:
        if softcap is not None:
            return _softcapped(query, key, value, attention_mask, scaling, softcap)
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return result
    _refuse(state, query, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = state.advance(query, key, value, scale=scale, softcap=softcap)
    return out.transpose(1, 2).contiguous(), None


def _refuse(
    state: LayerState, query: Tensor, mask: Tensor | None, extra: dict[str, Any]
) -> None:
    """Say what a policy layer would otherwise silently get wrong."""
    if extra.get("s_aux") is not None:
        raise ModelError("models with learned attention sinks are not supported")
    if mask is not None:
        seen = mask[..., -1, :]  # the newest query of a plain causal mask sees every token
        if not bool(seen.all() if seen.dtype == torch.bool else (seen == 0).all()):
            raise ModelError("padded batches are not supported; give prompts of equal length")
    ids = extra.get("position_ids")
    if state.reindex and ids is not None and query.shape[2] > 1 and int(ids.min()) != state.seen:
        raise ModelError(
            f"positions 'cache' counts tokens from the start of the stream: expected position "
            f"{state.seen}, got {int(ids.min())}"
        )


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
    s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    return (s.softmax(-1) @ value).transpose(1, 2).contiguous(), None
