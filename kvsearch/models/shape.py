"""What kvsearch must know of a transformers model: shape, cached layers, rotary angles."""

from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.errors import ModelError, quoted
from kvsearch.policy import ModelShape
from kvsearch.policy.channels import ALL, kept_in


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
        ModelError: the model has no such layer, no attention heads at all, or an encoder.
    """
    cfg = text_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model type {quoted(config.model_type)} has an encoder and a decoder; kvsearch serves "
            "decoders only"
        )
    heads = getattr(cfg, "num_attention_heads", None)
    if not heads:
        raise ModelError(
            f"model type {quoted(cfg.model_type)} has no attention heads, so no KV cache"
        )
    layers = policy_layers(config)
    if not layers:
        raise ModelError(
            f"every layer of this {quoted(cfg.model_type)} model has a sliding window or linear "
            "attention; its cache is bounded already and there is nothing to search"
        )
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // heads
    kv_heads = getattr(cfg, "num_key_value_heads", None) or heads
    shape = ModelShape(
        layers=len(layers),
        kv_heads=kv_heads,
        head_dim=dim,
        heads=heads,
        others=cfg.num_hidden_layers - len(layers),
    )
    blocks = getattr(cfg, "block_configs", None) or ()
    return shape.with_widths(tuple(_widths(block["attention"], dim) for block in blocks))


def _widths(attention: Any, head_dim: int) -> tuple[int, int]:
    """Channels of a key and a value in a layer of a pruned model, see `kvsearch.models.pruned`."""
    if attention["no_op"]:
        return 0, 0
    pairs, values = (kept_in(attention.get(k, ALL)) for k in ("kept_pairs", "kept_values"))
    return (
        head_dim if pairs is None else 2 * len(pairs[0]),
        head_dim if values is None else len(values[0]),
    )


def unwrapped(model: Any) -> Any:
    """The transformers model inside of a PEFT, compiled or parallel model, which shares its layers.

    Raises:
        ModelError: the model is tuned by a prefix, a cache of its own.
    """
    from transformers import PreTrainedModel

    while not isinstance(model, PreTrainedModel):
        tuned = getattr(model, "active_peft_config", None)
        kind = getattr(getattr(tuned, "peft_type", None), "value", None)
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            raise ModelError(
                f"a PEFT model of kind {kind} begins with keys and values of its own, which no "
                "policy cache holds; use another kind, such as LoRA"
            )
        if hasattr(model, "get_base_model"):
            found = model.get_base_model()
        elif hasattr(model, "peft_config"):  # adapters of several kinds, or inside of PEFT's
            found = model.model
        else:
            found = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(found, nn.Module):
            return model
        model = found
    return model


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the first list of as many modules as the model says it has layers."""
    count = text_config(model.config).num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    return list(next((m for m in lists if len(m) == count), ()))


def rotary_candidates(model: nn.Module) -> list[Tensor]:
    """Angles per position that some layer of `model` may turn its channel pairs by, each `[R / 2]`.

    The last ones are zero: a layer may leave its keys as they are. Which layer uses which is for
    the cache to find out, see `kvsearch.cache.model.rotary`.

    Raises:
        ModelError: the model's positions cannot be re-indexed, whatever the layer.
    """
    cfg = text_config(model.config)
    rope = getattr(cfg, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    kind = rope.get("rope_type", "default")
    if "dynamic" in kind or kind == "longrope":
        raise ModelError(
            f"positions 'cache' cannot be used with rope type {kind!r}, whose angles change with "
            "the length; use positions 'original'"
        )
    if "mrope_section" in rope and cfg is not model.config:
        raise ModelError(
            "positions 'cache' cannot be used with the rotary embedding of images, which has no "
            "single position per token; use positions 'original'"
        )
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and buffer.dim() == 1 and not _known(buffer, found):
            found.append(buffer)
    return [*found, torch.zeros(1, dtype=torch.float32, device="cpu")]


def _known(x: Tensor, others: list[Tensor]) -> bool:
    return any(x.shape == other.shape and torch.equal(x, other) for other in others)
