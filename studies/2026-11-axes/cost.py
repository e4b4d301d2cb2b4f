"""What ragged heads cost: CPU seconds of one thread, against the same policy with even heads.

    OMP_NUM_THREADS=1 python studies/2026-11-axes/cost.py --wikitext wikitext2-test.raw [--pairs 5]

The policy of `studies/2026-11-outcome` at 256 slots, with its ladder, `xmu`, and *designed*: each
evaluated on a window of 4096 tokens with even heads and with budgets per head (*measured*, power
0.5), *designed* with AdaKV too, at the same bytes, in turn, after a first evaluation that does not
count. Writes records/cost.json; policies that the file has are kept.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from variants import HERE, OUTCOME, by_weights, fitted, layers, rows

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Budgets, Policy
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.workloads.text import read_file, tokenize, windows

CONTEXT, BUDGET = 4096, 256


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--pairs", type=int, default=5)
    o = ask.parse_args()
    torch.set_num_threads(1)
    loaded = load_model()
    evaluator = Evaluator(loaded)
    tokens = tokenize(loaded.tokenizer, read_file(f"{o.wikitext}:900000-1290547"))
    ids = windows(tokens, count=1, length=CONTEXT)
    setting = Setting(loaded.shape, loaded.shape.budget_bytes(BUDGET), CONTEXT)
    measured = json.loads((HERE / "heads.json").read_text())["measured 0"]["losses"]
    ragged = by_weights(rows(measured, setting), 0.5)
    file = HERE / "records" / "cost.json"
    found: dict[str, list[dict[str, float]]] = json.loads(file.read_text()) if file.exists() else {}
    designed = replace(setting, sensitivity=layers(BUDGET))
    for name, policy in (
        ("found", Policy.from_json(OUTCOME / f"b{BUDGET}" / "best.json")),
        ("xmu", at("xmu", setting)),
        ("designed", at("rotated+sensitivity", designed)),
    ):
        if name in found:
            continue
        every = {"even": Budgets(), "ragged": ragged}
        if name == "designed":
            every["adakv"] = Budgets(kind="adakv")
        kinds = {kind: fitted(policy, setting, budgets) for kind, budgets in every.items()}
        pairs = []
        for pair in range(-1, o.pairs):
            pairs.append({k: round(seconds(evaluator, p, ids), 2) for k, p in kinds.items()})
            print(name, pair, pairs[-1], flush=True)
        found[name] = pairs[1:]
    file.write_text(json.dumps(found) + "\n", newline="\n")


def seconds(evaluator: Evaluator, policy: Policy, ids: object) -> float:
    """CPU seconds of one evaluation."""
    start = time.process_time()
    evaluator.quality(policy, ids, resident=False)  # type: ignore[arg-type]
    return time.process_time() - start


if __name__ == "__main__":
    main()
