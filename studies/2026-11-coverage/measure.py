"""Losses of few policies on many windows: sums over blocks of 64 scored tokens.

    python studies/2026-11-coverage/measure.py --wikitext wikitext2-test.raw --sotu sotu.txt

Writes `records/TEXT.json`, a policy at a time; policies that are there are not measured again.
About 340 CPU seconds a text on one core.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models.load import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.results.intervals import BLOCK, blocks
from kvsearch.workloads.text import read_files, tokenize, windows

HERE = Path(__file__).parent
BUDGET, CONTEXT, WINDOWS = 256, 1536, 8
METHODS = (
    "window", "h2o", "xmu", "window+int4", "h2o+int4", "h2o+int4-fine", "xmu+int4",
)  # fmt: skip
PARTS = {"wikitext": "0-600000", "sotu": "0-1500000"}  # bytes: what a search may see


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    for name in PARTS:
        ask.add_argument(f"--{name}", type=Path, required=True)
    files = vars(ask.parse_args())
    loaded = load_model(dtype="float32", announce=print)
    evaluator = Evaluator(loaded)
    setting = Setting(loaded.shape, loaded.shape.budget_bytes(BUDGET), CONTEXT)
    policies = {"full": Policy(name="full"), **{n: at(n, setting) for n in METHODS}}
    for name, part in PARTS.items():
        text = tokenize(loaded.tokenizer, read_files((f"{files[name]}:{part}",)))
        ids = windows(text, count=WINDOWS, length=CONTEXT)
        out = HERE / "records" / f"{name}.json"
        empty = {"tokens": CONTEXT - BUDGET, "block": BLOCK, "sums": {}}
        kept = json.loads(out.read_text()) if out.exists() else empty
        for key, policy in policies.items():
            if key in kept["sums"]:
                continue
            start = time.process_time()
            nll = evaluator.quality(policy, ids, resident=False).nll
            kept["sums"][key] = np.round(blocks(nll[:, BUDGET - 1 :]).sums, 3).tolist()
            write_atomic(out, json.dumps(kept) + "\n")
            print(name, key, round(time.process_time() - start), "s", flush=True)


if __name__ == "__main__":
    main()
