"""What the study runs: every named method, the policies of the outcome study, and the stream.

Methods that need a measurement of the model get made-up numbers, by layer, head and channel: only
speed and memory are measured here.
"""

import csv
import random
from pathlib import Path
from typing import Any

import torch

from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.policy import HeadLosses, ModelShape, Policy
from kvsearch.policy.pruning import SCORES, Importance, Order, Orders
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import METHODS, at
from kvsearch.workloads.text import builtin, tokenize, windows

HERE = Path(__file__).parent
OUTCOME = HERE.parent / "2026-11-outcome"
FOUND = {f"found at {n}": OUTCOME / f"b{n}" / "best.json" for n in (128, 192, 256, 384)}
NAMES = (*METHODS, *FOUND)
PARTS = {"first prompt": 512, "decoded": 4, "second turn": 256, "chunk": 300}
SLOTS = 256  # fp16 slots in each layer whose bytes are the budget


def start() -> tuple[Any, torch.Tensor]:
    """The model, and the stream `[1, T]`."""
    torch.set_num_threads(1)
    loaded = load_model()
    tokens = tokenize(loaded.tokenizer, builtin())
    return loaded, torch.from_numpy(windows(tokens, count=1, length=sum(PARTS.values())))


def chosen(name: str, loaded: Any) -> Policy:
    """The policy of a name."""
    if name in FOUND:
        return Policy.from_json(FOUND[name])
    shape, first = loaded.shape, PARTS["first prompt"]
    length = sum(PARTS.values())
    slots = SLOTS + (length - first if "prompt" in name else 0)  # these keep all that follows
    draw = random.Random(0)
    setting = Setting(
        shape, shape.budget_bytes(slots), length, prompt=first, heads=_heads(shape, draw),
        importance=_importance(shape, draw),
    )  # fmt: skip
    return at(name, setting)


def _heads(shape: ModelShape, draw: random.Random) -> HeadLosses:
    sizes, bits = (16, 64, 256, 1024), (8, 4, 3, 2)
    each = [draw.uniform(0.5, 2) for _ in range(shape.layers * shape.kv_heads)]
    return HeadLosses(
        shape.kv_heads,
        sizes,
        tuple(tuple(x / s for s in sizes) for x in each),
        bits,
        tuple(tuple(x * 4.0**-b for b in bits) for x in each),
        tuple(tuple(x * 3.0**-b for b in bits) for x in each),
        starved=16,
    )


def _importance(shape: ModelShape, draw: random.Random) -> Importance:
    def order(channels: int) -> Order:
        one = range(channels)
        return tuple(
            tuple(tuple(draw.sample(one, channels)) for _ in range(shape.kv_heads))
            for _ in range(shape.layers)
        )

    half = shape.head_dim // 2
    orders = {s: Orders(order(half), order(half), order(shape.head_dim)) for s in SCORES}
    return Importance(tuple(draw.uniform(0, 3) for _ in range(shape.layers)), orders)


def keep(kind: str, name: str, new: list[dict[str, Any]]) -> None:
    """Add rows to the records of one policy, a file for each."""
    file = HERE / "records" / f"{kind}-{name.replace(' ', '-')}.csv"
    old = list(csv.DictReader(file.open(newline=""))) if file.exists() else []
    lines = [",".join(new[0]), *(",".join(map(str, row.values())) for row in [*old, *new])]
    write_atomic(file, "\n".join(lines) + "\n")
