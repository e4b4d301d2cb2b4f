"""Where policy layers go among a model's cache layers, also where a layer has linear attention too.

A layer of Falcon-H1 or Zamba2 attends and runs a state-space model beside that, whose state does
not grow. Its policy layer then holds keys and values, and transformers' layer the state.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvsearch.errors import ModelError
from kvsearch.models.shape import policy_layers, text_config

_FULL = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
# of layers whose window hides nothing
_WIDE = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)


class HybridLayer(LinearAttentionAndFullAttentionLayer):
    """A layer's linear attention as transformers holds it, beside what attends.

    Attributes:
        attends: holds the layer's keys and values.
    """

    is_croppable = False

    def __init__(self, attends: CacheLayerMixin, number_of_states: int) -> None:
        super().__init__(number_of_states=number_of_states)
        self.attends = attends

    @property
    def held(self) -> Any:
        """Of what attends."""
        return getattr(self.attends, "held", None)

    @property
    def padded(self) -> Any:
        """Of what attends."""
        return getattr(self.attends, "padded", None)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Hand new keys and values to what attends."""
        self.is_initialized = True
        return self.attends.update(*args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Lengths for a mask."""
        first, second = self.attends.get_mask_sizes(query_length)
        return first, second

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return int(self.attends.get_seq_length())

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.reset(self)
        self.attends.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select batch rows."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        self.attends.reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select batch rows; transformers has two names for it."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        held: Any = next(x for x in self.conv_states.values() if x is not None)
        self.reorder_cache(torch.arange(len(held), device="cpu").repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, as what attends does."""
        self.attends.crop(tokens_to_remove)


def attending(layers: Iterable[Any]) -> list[Any]:
    """Cache layers, each hybrid one replaced by what attends in it."""
    return [x.attends if isinstance(x, HybridLayer) else x for x in layers]


def placed(model: PreTrainedModel, mine: Sequence[CacheLayerMixin]) -> list[Any]:
    """Cache layers of `model`, those with full attention replaced by `mine`.

    Raises:
        ModelError: its layers share caches, or have some of an unknown kind.
    """
    layers: list[Any] = list(DynamicCache(config=model.config).layers)
    held = policy_layers(model.config)
    full = {i for i, x in enumerate(layers) if type(x) in _FULL}  # no subclass
    if not full <= set(held) or any(type(layers[i]) not in _FULL + _WIDE for i in held):
        raise ModelError(
            f"the layers of this {text_config(model.config).model_type!r} model share caches or "
            "have caches of a kind that kvsearch does not know"
        )
    for i, layer in zip(held, mine, strict=True):
        linear = isinstance(layers[i], LinearAttentionLayer)
        layers[i] = HybridLayer(layer, layers[i].number_of_states) if linear else layer
    return layers
