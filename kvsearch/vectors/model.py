"""The model of the kit: a small Llama whose weights follow from integers alone.

Every weight is a whole number from -128 to 127 over a power of two, so it is exact in fp32, fp16
and bf16, on every machine and in every version of a random number generator.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvsearch.models.read import quiet
from kvsearch.policy import ModelShape, Policy

VOCABULARY = 64
HEAD_DIM = 16  # at least
WIDTH = 32  # at least: a whole number of query heads
POWERS = {"embed": 64, "lm_head": 64, "q_proj": 256, "k_proj": 256}  # of the rest: 512
LAYERS, KV_HEADS, GROUP = 2, 2, 2  # where the policy has no lists; query heads per KV head


def shape_for(policy: Policy) -> ModelShape:
    """The smallest shape that can run `policy`: its lists say how many layers and heads."""
    lists = [policy.budgets.weights, () if policy.head_tiers is None else policy.head_tiers.of]
    rows = next((x for x in lists if x), ())
    layers = len(rows) or LAYERS
    heads = next((len(x) for y in lists for x in y if isinstance(x, tuple)), KV_HEADS)
    group = 1
    if policy.quantizes and policy.quantizer.scaled:
        group = policy.quantizer.group or 1
    dim = group * -(-HEAD_DIM // group)
    return ModelShape(layers=layers, kv_heads=heads, head_dim=dim + dim % 2, heads=GROUP * heads)


def tiny(shape: ModelShape) -> PreTrainedModel:
    """The model, in fp32 on the CPU."""
    width = -(-WIDTH // shape.heads) * shape.heads
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=48,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )
    with quiet():
        model = LlamaForCausalLM(config)
    state = {}
    for seed, (name, old) in enumerate(sorted(model.state_dict().items())):
        if name.endswith("norm.weight"):
            state[name] = torch.ones_like(old)
            continue
        power = next((x for part, x in POWERS.items() if part in name), 512)
        whole = (draw(seed, old.numel()) >> np.uint64(56)).astype(np.int64) - 128
        state[name] = torch.from_numpy(whole).view(old.shape).float() / power
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


def ids_of(tokens: int, seed: int) -> NDArray[np.int64]:
    """Token ids `[tokens]`."""
    return (draw(1000 + seed, tokens) % np.uint64(VOCABULARY)).astype(np.int64)


def draw(seed: int, count: int) -> NDArray[np.uint64]:
    """`count` numbers of splitmix64 (Steele, Lea and Flood 2014), which is integers alone."""
    step, one = np.uint64(0x9E3779B97F4A7C15), np.uint64(1)
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + one + np.uint64(seed << 32)) * step
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
