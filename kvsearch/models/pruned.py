"""Llama-like models whose layers lost channels, or all of their attention (`kvsearch prune`).

A copy of this file lies beside the weights of a pruned model, so that transformers loads it with
`trust_remote_code=True`; it needs torch and transformers only.

`block_configs` of the config says what each layer has left, in the words of Nemotron-NAS
(arXiv:2411.19146): `attention.no_op` is a layer without attention, which has no weights for it and
stores nothing. Beside them `kept_pairs` and `kept_values` are hexadecimal masks of the rotary pairs
and value channels that each KV head keeps; where they are absent, it keeps all.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward, rotate_half


class Block(dict[str, Any]):
    """A part of a config, whose keys are attributes too: vLLM reads them as such."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def blocks_of(config: Any) -> list[Block]:
    """What every layer has left.

    Raises:
        ValueError: the layers differ in something else than their channels.
    """
    found = []
    group = config.num_attention_heads // config.num_key_value_heads
    for data in config.block_configs:
        attention, ffn = Block(data["attention"]), Block(data["ffn"])
        whole = attention.get("no_op") or attention.get("n_heads_in_group") == group
        plain = not attention.get("replace_with_linear") and not ffn.get("replace_with_linear")
        if not whole or not plain or ffn.get("no_op"):
            raise ValueError("only layers that lost channels or all attention are known here")
        found.append(Block(attention=attention, ffn=ffn))
    return found


def kept(word: str | None) -> list[list[int]] | None:
    """Channels of every KV head in a word of masks, or None for all."""
    if word is None:
        return None
    masks = [int(head, 16) for head in word.split()]
    return [[c for c in range(m.bit_length()) if m >> c & 1] for m in masks]


class PrunedConfig(LlamaConfig):
    """A Llama config with `block_configs`.

    Attributes:
        qkv_bias: whether queries, keys and values have a bias.
        o_bias: whether the output projection has one.
    """

    model_type = "kvsearch-pruned"
    block_configs: Any = None
    qkv_bias: bool = False
    o_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.block_configs = blocks_of(self) if self.block_configs else []


class DeciLMConfig(PrunedConfig):
    """The same under the name that vLLM and llama.cpp know, where only whole layers are gone."""

    model_type = "nemotron-nas"


class NoAttention(nn.Module):
    """Contributes nothing, and lets the cache count tokens without storing any."""

    def __init__(self, config: PrunedConfig, layer_idx: int) -> None:
        super().__init__()
        self.kv_heads, self.layer_idx = config.num_key_value_heads, layer_idx

    def forward(
        self, hidden_states: Tensor, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Zeros like `hidden_states` `[B, M, hidden]`."""
        if past_key_values is not None:
            B, M = hidden_states.shape[:2]
            nothing = hidden_states.new_empty(B, self.kv_heads, M, 0)
            past_key_values.update(nothing, nothing, self.layer_idx)
        return torch.zeros_like(hidden_states), None


class PrunedAttention(nn.Module):
    """Attention with fewer channels, at the softmax scale of whole heads."""

    def __init__(self, config: PrunedConfig, layer_idx: int) -> None:
        super().__init__()
        attention = config.block_configs[layer_idx]["attention"]
        D, H, Hq = config.head_dim, config.num_key_value_heads, config.num_attention_heads
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.num_key_value_groups, self.scaling = Hq // H, D**-0.5
        self.attention_dropout = config.attention_dropout
        pairs, values = kept(attention.get("kept_pairs")), kept(attention.get("kept_values"))
        self.key_dim = D if pairs is None else 2 * len(pairs[0])
        self.value_dim = D if values is None else len(values[0])
        self.pairs = None if pairs is None else torch.tensor(pairs, device="cpu")
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, Hq * self.key_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, H * self.key_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, H * self.value_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(Hq * self.value_dim, hidden, bias=config.o_bias)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `hidden_states` `[B, M, hidden]`."""
        B, M = hidden_states.shape[:2]
        q, k = (
            self._turned(proj(hidden_states).view(B, M, -1, self.key_dim), *position_embeddings)
            for proj in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(hidden_states).view(B, M, -1, self.value_dim).transpose(1, 2)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        out, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out.reshape(B, M, -1)), weights

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`x` `[B, M, heads, K]` by the angles of the pairs that it kept, `[B, heads, M, K]`."""
        cos, sin = (self._own(y, x.shape[2]) for y in (cos, sin))
        x = x.transpose(1, 2)
        return x * cos + rotate_half(x) * sin

    def _own(self, angles: Tensor, heads: int) -> Tensor:
        """The columns of `angles` `[B, M, D]` that belong to the kept pairs of `heads` heads."""
        if self.pairs is None:
            return angles.unsqueeze(1)
        self.pairs = self.pairs.to(angles.device)
        each = self.pairs.repeat_interleave(heads // self.pairs.shape[0], 0)  # [heads, K / 2]
        both = torch.cat([each, each], -1)
        return angles[:, :, both].transpose(1, 2)


class PrunedForCausalLM(LlamaForCausalLM):
    """A Llama whose attention is what `block_configs` has left of it."""

    config_class = PrunedConfig

    def __init__(self, config: PrunedConfig) -> None:
        super().__init__(config)
        for i, (layer, block) in enumerate(
            zip(self.model.layers, config.block_configs, strict=True)
        ):
            if block["attention"].get("no_op"):
                layer.self_attn, layer.input_layernorm = NoAttention(config, i), nn.Identity()
            else:
                layer.self_attn = PrunedAttention(config, i)
        self.post_init()


class DeciLMForCausalLM(PrunedForCausalLM):
    """The same under the name that vLLM and llama.cpp know."""

    config_class = DeciLMConfig
