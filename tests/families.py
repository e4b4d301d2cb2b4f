"""Tiny random models of many families in float64, for what each does around attention."""

from functools import lru_cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.cache_cases import sharp

T = 36
IDS = torch.randint(3, 97, (2, T), generator=torch.Generator().manual_seed(0))
MIXED = ["sliding_attention", "full_attention"]
BASE: dict[str, Any] = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ONE_HEAD_EACH: dict[str, Any] = dict(num_key_value_heads=4)
WINDOWED: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=16, sliding_window=8, layer_types=MIXED * 2
)
GEMMA2: dict[str, Any] = dict(WINDOWED, query_pre_attn_scalar=16, attn_logit_softcapping=2.0)


GEMMA4: dict[str, Any] = dict(
    WINDOWED, head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=97, num_kv_shared_layers=0,
)  # fmt: skip
MAMBA: dict[str, Any] = dict(mamba_d_state=8, mamba_d_conv=4)
FALCON_H1: dict[str, Any] = dict(
    **MAMBA, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_expand=2,
    mamba_chunk_size=8, mamba_d_ssm=64, head_dim=8,
)  # fmt: skip
ZAMBA2: dict[str, Any] = dict(
    **MAMBA, num_hidden_layers=4, layers_block_type=["mamba", "hybrid"] * 2, mamba_ngroups=1,
    n_mamba_heads=8, mamba_headdim=8, chunk_size=8, num_mem_blocks=1, adapter_rank=4,
)  # fmt: skip
LLAMA4: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=8, num_local_experts=2, num_experts_per_tok=1,
    intermediate_size_mlp=48, attention_chunk_size=8, no_rope_layers=[1, 0, 1, 0],
    layer_types=["chunked_attention", "full_attention"] * 2, experts_implementation="eager",
)  # fmt: skip
JAMBA: dict[str, Any] = dict(
    **MAMBA, num_hidden_layers=4, attn_layer_offset=1, attn_layer_period=2, mamba_dt_rank=4,
    expert_layer_offset=1, expert_layer_period=2, num_experts=2, num_experts_per_tok=1,
    use_mamba_kernels=False, experts_implementation="eager",
)  # fmt: skip
BAMBA: dict[str, Any] = dict(
    **MAMBA, num_hidden_layers=4, attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=8,
    mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8,
)  # fmt: skip


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4, factor=4.0, **more))


TWO_ROPES = dict(
    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
    sliding_attention=dict(rope_type="default", rope_theta=1e4),
)
LLAMA3 = scaled(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = scaled("yarn", original_max_position_embeddings=32)
HYBRID: dict[str, Any] = dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
MOE: dict[str, Any] = dict(
    num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    num_experts_per_tok=2, experts_implementation="eager",
)  # fmt: skip
DELTA: dict[str, Any] = dict(
    num_hidden_layers=4, head_dim=16, full_attention_interval=2, linear_num_value_heads=4,
    linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, **MOE,
)  # fmt: skip

WIDE = "qwen3 windows of all positions"

# name: class prefix, what differs from BASE
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama MQA": ("Llama", dict(num_key_value_heads=1)),
    "llama D 256": ("Llama", dict(head_dim=256)),
    "llama rope llama3": ("Llama", LLAMA3),
    "llama rope linear": ("Llama", scaled("linear")),
    "llama rope yarn": ("Llama", YARN),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", {}),
    "qwen2 half windowed": (
        "Qwen2",
        dict(WINDOWED, use_sliding_window=True, max_window_layers=2, layer_types=None),
    ),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "gemma D 256": ("Gemma", dict(head_dim=256)),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3", dict(WINDOWED, query_pre_attn_scalar=16, rope_parameters=TWO_ROPES)),
    "gemma4": ("Gemma4", GEMMA4),  # heads of windowed layers are smaller
    "phi3": ("Phi3", {}),
    "phi3 window of all positions": ("Phi3", dict(sliding_window=128)),
    "mistral window of more": ("Mistral", dict(sliding_window=4096)),
    WIDE: ("Qwen3", dict(WINDOWED, sliding_window=128, use_sliding_window=True)),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", dict(attention_multiplier=0.2, logits_scaling=3.0)),
    "smollm3": ("SmolLM3", dict(num_hidden_layers=4)),  # the last layer does not turn its keys
    "gpt-neox": ("GPTNeoX", dict(ONE_HEAD_EACH, rotary_pct=0.5)),
    "lfm2": ("Lfm2", HYBRID),
    "cohere": ("Cohere", {}),
    "gpt2": ("GPT2", dict(n_positions=128)),
}
LATENT: dict[str, Any] = dict(
    ONE_HEAD_EACH, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, first_k_dense_replace=2, n_routed_experts=4, n_group=1, topk_group=1,
    num_experts_per_tok=2, moe_intermediate_size=16,
)  # fmt: skip
SHARED: dict[str, Any] = dict(
    WINDOWED, num_kv_shared_layers=2, laurel_rank=8, hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=97, activation_sparsity_pattern=[0.0] * 4,
)  # fmt: skip
LONG = scaled(
    "longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4, original_max_position_embeddings=32
)
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", DELTA),
    "falcon-h1": ("FalconH1", FALCON_H1),
    "zamba2": ("Zamba2", ZAMBA2),
    "llama4": ("Llama4", LLAMA4),
    "jamba": ("Jamba", JAMBA),
    "bamba": ("Bamba", BAMBA),
    "gemma4 without windows": ("Gemma4", dict(GEMMA4, sliding_window=128)),
    "phi3 partial": ("Phi3", dict(partial_rotary_factor=0.5)),
    "mistral windowed": ("Mistral", dict(sliding_window=8)),
    "llama rope dynamic": ("Llama", scaled("dynamic") | dict(max_position_embeddings=32)),
    "gemma3 rope dynamic": (
        "Gemma3",
        dict(
            WINDOWED, max_position_embeddings=32, query_pre_attn_scalar=16,
            rope_parameters=dict(TWO_ROPES, full_attention=scaled("dynamic")["rope_parameters"]),
        ),
    ),
    "llama longrope": ("Llama", LONG),
    "phi3 longrope": ("Phi3", dict(LONG, original_max_position_embeddings=32)),
    "phimoe": (
        "Phimoe",
        dict(
            num_local_experts=2, num_experts_per_tok=1, sliding_window=None,
            experts_implementation="eager", rope_parameters=dict(
                LONG["rope_parameters"], short_mscale=1.0, long_mscale=1.2),
        ),
    ),
    "ministral3": ("Ministral3", dict(head_dim=16)),  # queries grow with the position
    "cohere2": ("Cohere2", dict(num_hidden_layers=4, sliding_window=8)),  # no RoPE in full layers
    "gpt-j": ("GPTJ", dict(n_positions=128, rotary_dim=4)),
    "falcon alibi": ("Falcon", dict(alibi=True)),
    "gpt-oss": ("GptOss", dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1,
                                experts_implementation="eager")),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "gemma3n": ("Gemma3n", SHARED),
}  # fmt: skip


@lru_cache(maxsize=1)  # tests of one family follow each other
def build(family: str, one_layer: bool = False) -> PreTrainedModel:
    prefix, differs = {**SERVED, **OTHERS}[family]
    name = prefix + "Text" if hasattr(transformers, prefix + "TextConfig") else prefix
    values = {**BASE, **differs}
    if one_layer:
        types = ["full_attention"] if "layer_types" in differs else None
        values |= {"num_hidden_layers": 1, "layer_types": types}
    if prefix in ("GPT2", "GPTNeoX", "GPTJ", "Falcon"):  # they would keep it and ignore it
        del values["num_key_value_heads"]
    experts = values.pop("experts_implementation", None)
    config = getattr(transformers, name + "Config")(**values)
    head = next(h for h in ("ForCausalLM", "LMHeadModel") if hasattr(transformers, prefix + h))
    torch.manual_seed(0)
    model = getattr(transformers, prefix + head)(config)
    if experts is not None:
        model.set_experts_implementation(experts)
    return sharp(model.double())


def logits(model: PreTrainedModel, cache: Any, *cuts: int, ids: Tensor = IDS) -> Tensor:
    sizes = [*cuts, ids.shape[1] - sum(cuts)]
    with torch.inference_mode():
        return torch.cat([model(x, past_key_values=cache).logits for x in ids.split(sizes, 1)], 1)
