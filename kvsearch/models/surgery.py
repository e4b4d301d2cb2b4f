"""A smaller model: removed channels are taken out of the weights (`kvsearch prune`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsearch.errors import ModelError
from kvsearch.models import pruned
from kvsearch.models.projections import projections
from kvsearch.models.pruned import DeciLMForCausalLM, PrunedForCausalLM
from kvsearch.models.shape import policy_layers, shape_of
from kvsearch.policy import Channels, ModelShape
from kvsearch.policy.channels import ALL

FAMILIES = ("llama", "mistral", "qwen2")  # whose layers are those of `pruned`
FILE = "modeling_kvsearch.py"  # copy of `pruned` beside the weights
STEP = 256  # that Nemotron-NAS rounds the size of an MLP up to


def prune(model: PreTrainedModel, channels: Channels) -> PrunedForCausalLM:
    """A model with the weights that `channels` keeps, to be saved; it shares whole ones.

    Channels lose their row of queries, keys and values and their column of the output projection,
    in all query heads of a KV head. The model is not changed.

    Args:
        model: on the CPU.
        channels: what to keep, which is not everything.

    Raises:
        PolicyError: the channels are of another model.
        ModelError: no class for what would be left.
    """
    assert channels.active
    shape = shape_of(model.config)
    channels.on(shape)
    _check_family(model, shape)
    config_class, model_class = pruned.PrunedConfig, PrunedForCausalLM
    if _as_nemotron(model.config, channels, shape):
        config_class, model_class = pruned.DeciLMConfig, DeciLMForCausalLM
    first = projections(model)[0]
    fields = set(config_class().to_dict()) - {"model_type", "architectures", "transformers_version"}
    kept = {k: v for k, v in model.config.to_dict().items() if k in fields}
    o_bias = first.o.bias is not None
    kept |= dict(
        head_dim=shape.head_dim,
        num_key_value_heads=shape.kv_heads,
        block_configs=[_block(model.config, channels, i, shape) for i in range(shape.layers)],
        qkv_bias=first.q.bias is not None,
        o_bias=o_bias,
        attention_bias=o_bias,
        auto_map={
            "AutoConfig": f"{FILE[:-3]}.{config_class.__name__}",
            "AutoModelForCausalLM": f"{FILE[:-3]}.{model_class.__name__}",
        },
    )
    with torch.device("meta"):
        small = model_class(config_class(**kept))
    small.load_state_dict(_weights(model, channels, shape), assign=True)
    small.tie_weights()
    small.generation_config = model.generation_config
    return small


def write(small: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save a model and its tokenizer, and a pruned model's code, into an existing folder.

    Raises:
        OSError: a file cannot be written; and what safetensors raises then.
    """
    small.save_pretrained(folder)
    if tokenizer is not None:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as e:  # tokenizers have no class of their own for a full disk
            raise OSError(str(e)) from e
    readable = (folder / "config.json").stat().st_mode
    for path in folder.glob("*.safetensors"):  # which are for the owner alone, as they come
        path.chmod(readable)
    if isinstance(small, PrunedForCausalLM):
        (folder / FILE).write_bytes(Path(pruned.__file__).read_bytes())


def _check_family(model: PreTrainedModel, shape: ModelShape) -> None:
    kind = model.config.model_type
    if kind not in FAMILIES or len(policy_layers(model.config)) != model.config.num_hidden_layers:
        raise ModelError(
            f"prune writes {', '.join(FAMILIES)} models with full attention in every layer, and "
            f"this is a {kind!r} model; a policy with channels runs on it as a view"
        )
    if shape.widths:
        raise ModelError("the model has had channels removed already")


def _as_nemotron(config: Any, channels: Channels, shape: ModelShape) -> bool:
    """Whether vLLM's and llama.cpp's Nemotron-NAS can express what is left."""
    only_layers = all(
        channels.removed(i) or channels.word("qk", i) == channels.word("vo", i) == ALL
        for i in range(shape.layers)
    )
    sizes = config.intermediate_size % STEP == 0 and config.hidden_act == "silu"
    return only_layers and sizes and shape.head_dim * shape.heads == config.hidden_size


def _block(config: Any, channels: Channels, layer: int, shape: ModelShape) -> dict[str, Any]:
    """A layer's entry of `block_configs`."""
    gone = channels.removed(layer)
    attention: dict[str, Any] = {
        "no_op": gone,
        "n_heads_in_group": None if gone else shape.heads // shape.kv_heads,
        "replace_with_linear": False,
    }
    for key, axis in (("kept_pairs", "qk"), ("kept_values", "vo")):
        if not gone and (word := channels.word(axis, layer)) != ALL:
            attention[key] = word
    # Nemotron-NAS has the size of an MLP as a multiple of 2/3 of the hidden size
    mult = 1.5 * config.intermediate_size / config.hidden_size
    while int(2 * mult * config.hidden_size / 3) < config.intermediate_size:
        mult += 1e-9
    ffn = {"no_op": False, "replace_with_linear": False, "ffn_mult": mult}
    return {"attention": attention, "ffn": ffn}


def _weights(model: PreTrainedModel, channels: Channels, shape: ModelShape) -> dict[str, Tensor]:
    """The state of the pruned model."""
    state: dict[str, Tensor] = dict(model.state_dict())
    group, D = shape.heads // shape.kv_heads, shape.head_dim
    for i in range(shape.layers):
        layer = f"model.layers.{i}."
        if channels.removed(i):
            gone = (f"{layer}self_attn.", f"{layer}input_layernorm.")
            state = {k: v for k, v in state.items() if not k.startswith(gone)}
            continue
        pairs, values = channels.pairs(i), channels.values(i)
        keys = None if pairs is None else [(*p, *(c + D // 2 for c in p)) for p in pairs]
        for name, kept, heads, axis in (
            ("q_proj.weight", keys, group, 0), ("q_proj.bias", keys, group, 0),
            ("k_proj.weight", keys, 1, 0), ("k_proj.bias", keys, 1, 0),
            ("v_proj.weight", values, 1, 0), ("v_proj.bias", values, 1, 0),
            ("o_proj.weight", values, group, 1),
        ):  # fmt: skip
            key = f"{layer}self_attn.{name}"
            if kept is not None and key in state:
                rows = [
                    (h * heads + g) * D + c
                    for h, mine in enumerate(kept) for g in range(heads) for c in mine
                ]  # fmt: skip
                index = torch.tensor(rows, device=state[key].device)
                state[key] = state[key].index_select(axis, index)
    return state
