"""What kvsearch must know of a transformers model: its shape, its cached layers, its rotary angles."""

from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.errors import ModelError
from kvsearch.policy import ModelShape

# Families whose rotary embedding turns channel c with channel c + D/2 by position alone. Only
# re-indexed positions need this; add a line after reading the family's `apply_rotary_pos_emb`.
HALF_SPLIT = frozenset(
    ["llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3", "gemma3_text", "granite", "olmo", "olmo2", "phi", "phi3", "smollm3", "stablelm", "starcoder2", "mixtral"]
)
STATIC_ROPE = frozenset(["default", "linear", "llama3", "yarn", "proportional"])


def text_config(config: Any) -> Any:
    """The decoder's part of a config."""
    return config.get_text_config(decoder=True)


def policy_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers with full attention; the others keep transformers' own cache."""
    cfg = text_config(config)
    types = getattr(cfg, "layer_types", None)
    if types is None:
        windowed = any(
            getattr(cfg, name, None) for name in ("sliding_window", "attention_chunk_size")
        )
        types = ["windowed" if windowed else "full_attention"] * cfg.num_hidden_layers
    return tuple(i for i, kind in enumerate(types) if kind == "full_attention")


def shape_of(config: Any) -> ModelShape:
    """Shape of the layers that a policy governs.

    Raises:
        ModelError: the model has no such layer, or no attention heads at all.
    """
    cfg = text_config(config)
    heads = getattr(cfg, "num_attention_heads", None)
    if not heads:
        raise ModelError(f"model type {cfg.model_type!r} has no attention heads, so no KV cache")
    layers = policy_layers(config)
    if not layers:
        raise ModelError(
            f"every layer of this {cfg.model_type!r} model has a sliding window or linear "
            "attention; its cache is bounded already and there is nothing to search"
        )
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // heads
    kv_heads = getattr(cfg, "num_key_value_heads", None) or heads
    return ModelShape(layers=len(layers), kv_heads=kv_heads, head_dim=dim, heads=heads)


def rotary_frequencies(model: nn.Module) -> Tensor:
    """Angle per position of each channel pair in the full-attention layers, `[R / 2]`.

    Raises:
        ModelError: the model's positions cannot be re-indexed.
    """
    cfg = text_config(model.config)
    if cfg.model_type not in HALF_SPLIT:
        raise ModelError(
            f"positions 'cache' needs rotary embeddings that kvsearch knows how to move, and model "
            f"type {cfg.model_type!r} is not among them; use positions 'original'"
        )
    rope = getattr(cfg, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if kind not in STATIC_ROPE:
        raise ModelError(
            f"positions 'cache' cannot be used with rope type {kind!r}, whose angles change with "
            "the length; use positions 'original'"
        )
    for module in model.modules():
        for name in ("full_attention_inv_freq", "inv_freq"):
            found = getattr(module, name, None)
            if isinstance(found, torch.Tensor):
                return found
    raise ModelError("this model has no rotary frequencies; use positions 'original'")
