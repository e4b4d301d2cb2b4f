"""A tiny model that generates, a prompt, and policies of every way into a cache."""

from typing import Any

import torch
from transformers import Gemma2Config, LlamaConfig, PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from kvsearch.policy import Budgets, HeadTiers, Ladder, Policy, Quantizer, Tier
from kvsearch.rules import Attention
from tests.cache_cases import sharp

SIZES: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NEW = 20
PROMPT = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(1))
POLICIES = {
    "full": Policy(),
    "window re-indexed": Policy(slots=16, sinks=2, positions="cache"),
    "ladder": Policy(slots=20, sinks=2, recent_window=4, interval=4, ladder=Ladder(span=0.5)),
    "h2o": Policy(slots=16, recent_window=4, rule=Attention()),
    "snapkv": Policy(
        slots=28,
        recent_window=4,
        interval=8,
        trigger="prompt+stream",
        rule=Attention(horizon=8, pool=3),
    ),
    "tiers": Policy(
        slots=24, interval=4, sinks=1, recent_window=2, rule=Attention(beta=1),
        tiers=(Tier(share=0.4, key_bits=8, value_bits=8),
               Tier(share=0.6, key_bits=4, value_bits=2)),
        quantizer=Quantizer(group=8, rotate=True, levels="lloyd", fp16_sinks=True),
    ),
    "ragged heads, bits per layer": Policy(
        slots=18, interval=4, sinks=1, recent_window=2, rule=Attention(beta=1),
        budgets=Budgets(
            kind="sensitivity", exponent=1.0, weights=((1.0, 2.0), (3.0, 1.0), (1.0, 1.5))
        ),
        tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=8),
        head_tiers=HeadTiers(others=((Tier(key_bits=8, value_bits=3),),), of=(0, 1, 0)),
    ),
}  # fmt: skip


def make(
    dtype: torch.dtype = torch.float64, windowed: bool = False, **more: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    if windowed:
        mixed = ["sliding_attention", "full_attention", "full_attention"]
        model: Any = Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=8, layer_types=mixed))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **more}))
    model = sharp(model.to(dtype))
    model.generation_config.eos_token_id = None  # every sequence is as long as asked
    return model
