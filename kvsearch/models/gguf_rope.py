"""How a GGUF file scales rotary angles, and what of a file nothing was made of.

transformers reads neither the keys nor the tensors that scale angles, so a model would be loaded
as another one.
"""

import math
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import ModelError
from kvsearch.models.gguf_header import Header
from kvsearch.models.shape import text_config

_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_FREQS, _LONG, _SHORT = (f"rope_{x}.weight" for x in ("freqs", "factors_long", "factors_short"))
_KEYS = {
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
}  # fmt: skip
_SIZES = {  # keys that repeat what follows from others
    "rope.dimension_count": lambda cfg, dim: int(dim * _rope(cfg).get("partial_rotary_factor", 1)),
    "attention.key_length": lambda cfg, dim: dim,
    "attention.value_length": lambda cfg, dim: dim,
}


def scales(header: Header) -> bool:
    """Whether a file says anything of scaled angles."""
    names = {_FREQS, _LONG, _SHORT} & header.tensors.keys()
    return bool(names or (_KEYS - {"rope.scaling.finetuned"}) & header.own.keys())


def scaled(config: Any, header: Header) -> Any:
    """A config as transformers reads it of a file, with the angles that the file says.

    Raises:
        ModelError: the file scales angles in a way that transformers does not know.
    """
    config = deepcopy(config)
    cfg = text_config(config)
    rope = _rope(cfg)
    if rope.get("rope_type", "default") == "default" and (found := _found(header, cfg, rope)):
        kept = {k: rope[k] for k in ("rope_theta", "partial_rotary_factor") if k in rope}
        rope.clear()
        rope.update(kept | found)
        if found["rope_type"] == "longrope" and found["short_factor"] != found["long_factor"]:
            cfg.original_max_position_embeddings = found["original_max_position_embeddings"]
    return config


def _rope(cfg: Any) -> dict[str, Any]:
    """The config's own dictionary, of layers with full attention where there are several."""
    rope: dict[str, Any] = cfg.rope_parameters
    return rope.get("full_attention", rope)


def _found(header: Header, cfg: Any, rope: dict[str, Any]) -> dict[str, Any] | None:
    own, path = header.own, header.path
    factor = float(own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0)
    kind = own.get("rope.scaling.type", "linear")
    factor = 1.0 if kind == "none" else factor
    reach = int(own.get("rope.scaling.original_context_length") or cfg.max_position_embeddings)
    attention = own.get("rope.scaling.attn_factor", own.get("rope.scaling.yarn_attn_factor"))
    freqs, short, long = (header.vector(x) for x in (_FREQS, _SHORT, _LONG))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise ModelError(f"{path} scales rotary angles by {kind!r}, which kvsearch does not know")
    if factor <= 0 or any(x is not None and not (x > 0).all() for x in (freqs, short, long)):
        raise ModelError(f"{path} scales rotary angles by zero or less; fetch it again")
    if kind == "yarn":
        if freqs is not None or own.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise ModelError(
                f"{path} scales rotary angles by yarn and otherwise too, which transformers does "
                "not know; load the model it was made of"
            )
        found: dict[str, Any] = dict(
            rope_type="yarn", factor=factor, original_max_position_embeddings=reach
        )
        for name in ("beta_fast", "beta_slow"):
            if (value := own.get(f"rope.scaling.yarn_{name}")) is not None:
                found[name] = float(value)
        if attention not in (None, 1.0):
            found["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
        return found
    if (short is None) != (long is None):
        raise ModelError(f"{path} has one of {_SHORT} and {_LONG} only; fetch it again")
    pairs = _pairs(cfg, rope)
    if short is None or long is None:
        if freqs is None and attention in (None, 1.0):
            return dict(rope_type="linear", factor=factor) if factor != 1.0 else None
        short = long = (np.ones(pairs, np.float32) if freqs is None else freqs) * factor
        attention = attention or 1.0
    elif factor != 1.0:
        raise ModelError(
            f"{path} scales rotary angles by {_LONG} and rope.scaling.factor too, which "
            "transformers does not know; load the model it was made of"
        )
    if not len(short) == len(long) == pairs:
        raise ModelError(
            f"{path} scales the angles of {len(short)} channel pairs, and its model has {pairs}"
        )
    if short is long and attention == 1.0 and (known := _llama3(short, rope, pairs)):
        return known
    found = dict(
        rope_type="longrope", original_max_position_embeddings=reach,
        short_factor=short.tolist(), long_factor=long.tolist(),
        factor=cfg.max_position_embeddings / reach,
    )  # fmt: skip
    return found if attention is None else {**found, "attention_factor": float(attention)}


def _pairs(cfg: Any, rope: dict[str, Any]) -> int:
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    return int(dim * rope.get("partial_rotary_factor", 1.0)) // 2


def _llama3(factors: NDArray[np.float32], rope: dict[str, Any], pairs: int) -> Any:
    """The parameters of Llama 3.1 and later, if they give these factors."""
    factor = float(factors.max())
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(pairs) / pairs)
    low, high, reach = _LLAMA3.values()
    smooth = np.clip((reach / waves - low) / (high - low), 0, 1)
    if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        return dict(_LLAMA3, rope_type="llama3", factor=factor)
    return None


def unread(header: Header, model: Any) -> list[str]:
    """Keys and tensors by which a model computes, and of which nothing was made.

    Tensors of layers come once, with `*` for the layer's number.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    cfg, name = text_config(model.config), header.architecture
    known = {k: to for x in _names(name) for k, to in GGUF_CONFIG_MAPPING.get(x, {}).items()}
    dim = getattr(cfg, "head_dim", None) or cfg.hidden_size // cfg.num_attention_heads
    keys = [
        f"{name}.{key}"
        for key, value in header.own.items()
        if key not in _KEYS
        and known.get(key) in (None, -1)
        and not (key in _SIZES and value == _SIZES[key](cfg, dim))
        and not (key == "vocab_size" and value == cfg.vocab_size)
    ]
    processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config=model.config.to_dict())
    taken = {_FREQS, _SHORT, _LONG, *get_gguf_hf_weights_map(model, processor)}
    experts = type(processor) is not TensorProcessor  # it takes apart, and joins, what it names
    tensors = [
        ".".join("*" if part.isdigit() else part for part in tensor.split("."))
        for tensor in header.tensors
        if tensor not in taken and not (experts and ("_exps" in tensor or "ssm" in tensor))
    ]
    return [*keys, *dict.fromkeys(tensors)]


def _names(architecture: str) -> Iterable[str]:
    """What transformers may call an architecture."""
    plain = architecture.replace("-", "_")
    return architecture, plain, plain.replace("moe", "_moe"), "mistral"
