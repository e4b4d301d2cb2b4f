"""What the points that every search begins with lose on a text, as they are and with an offset.

    python studies/2026-11-key-offsets/measure_points.py MODEL --name NAME --points earlier-1

One window of 768 tokens of the built-in text with a budget of 128 tokens in 16 bits; losses in nats
over the full cache from token 129 on. Appends to `records/NAME-points.jsonl`.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import head_losses, key_offsets
from kvsearch.models import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.portfolio import load
from kvsearch.session.progress import Shown
from kvsearch.workloads.text import tokenize, windows
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
LEARNED = HERE.parent / "2026-11-head-prices" / "learned.yaml"
CONTEXT, SLOTS = 768, 128


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--name", required=True)
    parser.add_argument("--points", nargs="+", default=["earlier-1", "earlier-4", "earlier-6"])
    parser.add_argument("--offsets", nargs="+", default=["none", "keys", "scaled"])
    given = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(*([given.model] if given.model else []))
    evaluator, shape, step = Evaluator(loaded), loaded.shape, Shown(quiet=True).step
    ids = windows(tokenize(loaded.tokenizer, builtin()), count=1, length=CONTEXT)
    means, _ = key_offsets.of_model(evaluator, step)
    heads, _ = head_losses.of_model(evaluator, step)
    setting = Setting(shape, shape.budget_bytes(SLOTS), CONTEXT, heads=heads)
    measured = replace(setting, offset=means.offset(loaded.model, CONTEXT))
    points = load(str(LEARNED))
    full = evaluator.quality(Policy(), ids, resident=False).nll[:, SLOTS:]
    for name in given.points:
        for offset in given.offsets:
            policy = build({**points[name].knobs, "offset": offset}, measured, name=name)
            nll = evaluator.quality(policy, ids, resident=False).nll[:, SLOTS:]
            row = {
                "model": given.name, "point": name, "offset": offset, "slots": policy.slots,
                "nll_full": float(full.mean(dtype=float)),
                "dnll": float((nll - full).mean(dtype=float)), "tokens": int(nll.size),
            }  # fmt: skip
            with (HERE / "records" / f"{given.name}-points.jsonl").open("a") as out:
                out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
