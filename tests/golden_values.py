"""Losses and held slots of kept policies as the present code gives them, a JSON line each.

    python tests/golden_values.py [NAME ...]

Of all policies of golden/nll.jsonl, or of those named. Run at two commits on one machine
(PYTHONPATH=CHECKOUT:CHECKOUT/kernels), the outputs say whether anything has changed between them,
to the bit: stored losses cannot where a processor sums in another order and a rank flips.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsearch.cache import PolicyCache
from kvsearch.policy import ModelShape, Policy

FILE = Path(__file__).parent / "golden" / "nll.jsonl"
RECORDS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
SHAPE, T = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=3), 1000


def model() -> LlamaForCausalLM:
    """A random model of 30 layers in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        head_dim=SHAPE.head_dim,
        max_position_embeddings=2048,
        initializer_range=0.25,
        rope_theta=1e4,
    )
    return LlamaForCausalLM(config).double().eval()


def values(record: dict[str, Any], on: LlamaForCausalLM) -> dict[str, Any]:
    """Slots held after the text, and mean NLL of all tokens and of those from 500 on."""
    cache = PolicyCache(Policy.build(record["policy"]), on, packed=False)
    ids = torch.randint(0, 257, (1, T), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = on(ids, past_key_values=cache).logits
        nll = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    held = [s.store.n for s in cache.groups]
    return {
        "name": record["name"], "held": held, "nll": [float(nll.mean()), float(nll[500:].mean())]
    }  # fmt: skip


if __name__ == "__main__":
    made = model()
    for r in RECORDS:
        if r["name"] in sys.argv[1:] or not sys.argv[1:]:
            print(json.dumps(values(r, made)), flush=True)
