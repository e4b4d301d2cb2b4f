"""Losses of one text under eight policies: weights in fp32, with other last bits, and in bf16.

    python measure.py

Writes nll.jsonl: a line of losses in nats, token by token, for each policy on each kind of weights.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models import LoadedModel, load_model
from kvsearch.policy import Policy
from kvsearch.workloads.text import builtin, tokenize

HERE = Path(__file__).parent
TOKENS = 640
ZOO = json.loads((HERE.parent / "2026-11-vllm" / "zoo-b256.json").read_text(encoding="utf-8"))
SLOTS = {"slots": 128, "interval": 16, "sinks": 4, "recent_window": 32}
EIGHT, FOUR = ({"tiers": [{"key_bits": n, "value_bits": n}], "interval": 16} for n in (8, 4))
POLICIES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": SLOTS,
    "window192": SLOTS | {"slots": 192},
    "h2o": SLOTS | {"rule": {"name": "attention", "alpha": 1.0, "beta": 1.0}},
    "random": SLOTS | {"rule": {"name": "random"}},
    "8 bits": EIGHT,
    "4 bits": FOUR | {"quantizer": {"rotate": True}},
    "zoo-b256": {k: v for k, v in ZOO.items() if k not in ("schema", "name", "about")},
}


def losses(loaded: LoadedModel, weights: str, ids: np.ndarray[Any, Any]) -> list[str]:
    """A line of nll.jsonl for each policy."""
    evaluator, out = Evaluator(loaded), []
    for name, policy in POLICIES.items():
        nll = evaluator.quality(Policy.build(policy), ids, resident=False).nll[0]
        line = {"weights": weights, "policy": name, "nll": [round(float(x), 6) for x in nll]}
        out.append(json.dumps(line))
        print(weights, name, float(nll.mean()), flush=True)
    return out


def main() -> None:
    loaded = load_model(device="cpu")
    tokens = tokenize(loaded.tokenizer, builtin())
    ids = np.concatenate([tokens.start, tokens.ids[: TOKENS - len(tokens.start)]])
    ids = ids.astype(np.int64)[None]
    lines = losses(loaded, "fp32", ids)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():  # times 1 or a neighbour of 1
        for p in loaded.model.parameters():
            p.mul_(1 + (torch.randint(0, 3, p.shape, generator=draw) - 1) * 1.2e-7)
    lines += losses(loaded, "other last bits", ids)
    half = LoadedModel.of(loaded.model.to(torch.bfloat16), loaded.tokenizer)
    lines += losses(half, "bf16", ids)
    write_atomic(HERE / "nll.jsonl", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
