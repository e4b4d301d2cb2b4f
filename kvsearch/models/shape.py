"""What kvsearch must know of a transformers model: shape, cached layers, rotary angles."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvsearch.errors import ModelError, quoted
from kvsearch.policy import ModelShape
from kvsearch.policy.channels import ALL, kept_in

_WINDOWS = ("sliding_window", "attention_chunk_size")


def text_config(config: Any) -> Any:
    """The decoder's part of a config."""
    return config.get_text_config(decoder=True)


def layer_configs(config: Any) -> list[Any]:
    """The config that each layer of a decoder goes by; one and the same where all are alike."""
    cfg = text_config(config)
    if getattr(cfg, "is_heterogeneous", False):
        return list(cfg.per_layer_config)
    return [cfg] * cfg.num_hidden_layers


def policy_layers(config: Any) -> tuple[int, ...]:
    """Indices of the layers with full attention; the others keep transformers' own cache.

    A layer that mixes by linear attention too has full attention. A window that reaches as far as
    the model's positions hides nothing, so a layer with such a window has full attention, too.
    """
    kinds = getattr(text_config(config), "layer_types", None)
    kinds = kinds or [None] * text_config(config).num_hidden_layers
    layers = zip(kinds, layer_configs(config), strict=True)
    return tuple(i for i, (kind, cfg) in enumerate(layers) if _sees_all(kind, cfg))


def _sees_all(kind: str | None, cfg: Any) -> bool:
    if kind in ("full_attention", "hybrid"):
        return True
    if kind not in (None, "sliding_attention", "hybrid_sliding", "chunked_attention"):
        return False
    names = {"chunked_attention": ("attention_chunk_size",), None: _WINDOWS}
    windows = [getattr(cfg, name, None) for name in names.get(kind, ("sliding_window",))]
    reach = getattr(cfg, "max_position_embeddings", None)
    return all(not w or (reach and w >= reach) for w in windows) and (kind is None or any(windows))


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
    if not any(_heads(own)[0] for own in layer_configs(config)):
        raise ModelError(
            f"model type {quoted(cfg.model_type)} has no attention heads, so no KV cache"
        )
    layers = policy_layers(config)
    if not layers:
        raise ModelError(
            f"every layer of this {quoted(cfg.model_type)} model has a sliding window or linear "
            "attention; its cache is bounded already and there is nothing to search"
        )
    each = layer_configs(config)
    sizes = {_heads(each[i]): i for i in reversed(layers)}  # with the first layer of that size
    if len(sizes) > 1:
        (i, one), (j, other) = sorted((i, size) for size, i in sizes.items())[:2]
        raise ModelError(
            f"layers of this {quoted(cfg.model_type)} model with full attention have heads of "
            f"different kinds: layer {i} {_told(one)}, layer {j} {_told(other)}; a policy serves "
            "layers whose heads are alike"
        )
    ((heads, kv_heads, dim),) = sizes
    shape = ModelShape(
        layers=len(layers),
        kv_heads=kv_heads,
        head_dim=dim,
        heads=heads,
        others=cfg.num_hidden_layers - len(layers),
    )
    blocks = getattr(cfg, "block_configs", None) or ()
    return shape.with_widths(tuple(_widths(block["attention"], dim) for block in blocks))


def windowed_bytes(config: Any, governed: Sequence[int], context: int) -> int:
    """Bytes of a sequence in 16 bits in layers with a sliding window, which no policy governs.

    Args:
        config: of the model.
        governed: `policy_layers`.
        context: tokens of the sequence.
    """
    kinds = getattr(text_config(config), "layer_types", None)
    total = 0
    for i, cfg in enumerate(layer_configs(config)):
        sees = kinds[i] if kinds else "sliding_attention"
        name = "attention_chunk_size" if sees == "chunked_attention" else "sliding_window"
        if i in governed or sees not in ("sliding_attention", "chunked_attention"):
            continue  # layers with linear attention hold a state of one size
        _, kv_heads, dim = _heads(cfg)
        total += min(context, getattr(cfg, name, None) or context) * 2 * 2 * kv_heads * dim
    return total


def _heads(cfg: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a layer with its own config; zeros without heads."""
    heads = getattr(cfg, "num_attention_heads", None) or 0
    if not heads:
        return 0, 0, 0
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // heads
    return heads, getattr(cfg, "num_key_value_heads", None) or heads, dim


def _told(size: tuple[int, int, int]) -> str:
    return f"has {size[0]} query and {size[1]} KV heads of {size[2]} channels"


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
    while (found := inner(model)) is not None:
        tuned = getattr(model, "active_peft_config", None)
        kind = getattr(getattr(tuned, "peft_type", None), "value", None)
        if kind in ("PREFIX_TUNING", "CARTRIDGE"):
            raise ModelError(
                f"a PEFT model of kind {kind} begins with keys and values of its own, which no "
                "policy cache holds; use another kind, such as LoRA"
            )
        model = found
    return model


def inner(model: Any) -> Any:
    """What a model of torch.compile, several devices or PEFT holds; None: it is no wrapper."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return None
    found: Any = model._modules.get("_orig_mod")  # of torch.compile, which has all names inside
    if found is None and hasattr(model, "peft_config"):
        whole: Any = model
        # the second: adapters of several kinds, or inside of PEFT's
        found = whole.get_base_model() if hasattr(whole, "get_base_model") else whole.model
    elif found is None:
        found = getattr(model, "module", None)
    return found if isinstance(found, nn.Module) else None


def entrance(model: Any) -> torch.device:
    """The device that tokens go to; of an offloaded model where accelerate computes."""
    for module in (model.get_input_embeddings(), model):
        for one in hooks(module):
            if (device := getattr(one, "execution_device", None)) is not None:
                return torch.device(device)
    found: torch.device = model.device
    return found


def hooks(module: nn.Module) -> list[Any]:
    """What accelerate has hung on a module, which moves weights and inputs."""
    hook = getattr(module, "_hf_hook", None)
    return list(getattr(hook, "hooks", [hook]))  # its SequentialHook has several


def require_wiring(model: Any, calls: Sequence[Sequence[Sequence[Tensor]]]) -> None:
    """Every policy layer must hand over its keys once, in the shape that the config says.

    Args:
        model: it.
        calls: queries, keys and values `[1, heads, 1, D]` of each call of each layer's attention.

    Raises:
        ModelError: some layer does something else.
    """
    shape, name = shape_of(model.config), type(model).__name__
    layers = zip(policy_layers(model.config), shape.per_layer, calls, strict=True)
    for i, (key, value), mine in layers:
        H = shape.kv_heads
        want = [(1, shape.heads, 1, key), (1, H, 1, key), (1, H, 1, value)]
        got = [[tuple(x.shape) for x in call] for call in mine]
        if key and not got and not model._can_set_attn_implementation():
            raise ModelError(
                f"{name} does not attend through transformers' attention interface, so no policy "
                "cache can serve it"
            )
        if got != ([want] if key else []):
            raise ModelError(
                f"layer {i} of {name} does not hand {H} keys and values of {key} and {value} "
                "channels, once, to transformers' attention interface; no policy cache can serve it"
            )


def body(model: Any) -> Any:
    """What gives a model's hidden states; the model itself where nothing apart from it does."""
    found = model.base_model
    return getattr(model, "model", model) if found is model else found  # Llama4ForCausalLM's


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the first list of as many modules as the model says it has layers."""
    count = text_config(model.config).num_hidden_layers
    lists = (m for m in model.base_model.modules() if isinstance(m, nn.ModuleList))
    return list(next((m for m in lists if len(m) == count), ()))


def angle_switch(config: Any) -> tuple[str, int] | None:
    """Rope type and tokens up to which a model turns its keys alike, if longer texts change that.

    Then it turns all tokens of a call by other angles, and what a cache holds keeps the old ones.
    """
    cfg = text_config(config)
    rope = getattr(cfg, "rope_parameters", None) or {}
    found = []
    for part in [x for x in rope.values() if isinstance(x, dict)] or [rope]:
        kind = part.get("rope_type", "default")
        if "dynamic" in kind:  # at all positions a model keeps the angles of a longer call before
            found.append((kind, cfg.max_position_embeddings - 1))
        elif kind == "longrope" and any(
            part.get(f"short_{x}") != part.get(f"long_{x}") for x in ("factor", "mscale")
        ):
            own = getattr(cfg, "original_max_position_embeddings", None)
            found.append((kind, part.get("original_max_position_embeddings", own)))
    return min(found, key=lambda x: x[1], default=None)


def require_angles(switch: tuple[str, int] | None, seen: int, tokens: int) -> None:
    """Raise a `ModelError` if keys that a cache holds would have been turned by other angles.

    Args:
        switch: of the model, see `angle_switch`.
        seen: tokens of the calls before.
        tokens: these, and those of the call.
    """
    if switch is None or tokens <= switch[1]:
        return
    kind, most = switch
    if kind == "longrope" and not 0 < seen <= most:
        return
    if kind == "longrope":
        raise ModelError(
            f"the model turns its keys by other angles from token {most + 1} on (rope type "
            f"{kind!r}), and the {seen} that a cache holds by then keep theirs; stop at {most} "
            f"tokens, or give an empty cache more than {most} in its first call, as after reset()"
        )
    raise ModelError(
        f"the model's rotary angles may change with every token after {most} (rope type {kind!r}), "
        f"and keys that a cache holds keep theirs; stay within {most} tokens"
    )


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
    if switch := angle_switch(cfg):
        raise ModelError(
            f"positions 'cache' cannot be used with rope type {switch[0]!r}, whose angles change "
            "with the length; use positions 'original'"
        )
    if "mrope_section" in rope and cfg is not model.config:
        raise ModelError(
            "positions 'cache' cannot be used with the rotary embedding of images, which has no "
            "single position per token; use positions 'original'"
        )
    found: list[Tensor] = []
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and name.endswith("inv_freq"):  # where accelerate offloads buffers
                buffer = hook.weights_map[name]
            if name.endswith("inv_freq") and buffer.dim() == 1 and not _known(buffer, found):
                found.append(buffer)
    return [*found, torch.zeros(1, dtype=torch.float32, device="cpu")]


def _known(x: Tensor, others: list[Tensor]) -> bool:
    return any(x.shape == other.shape and torch.equal(x, other) for other in others)
