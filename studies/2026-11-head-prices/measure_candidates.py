"""Candidates for the portfolio, with head budgets by `kvsearch heads`, on the tasks of the old one.

    python studies/2026-11-head-prices/measure_candidates.py --wikitext FILE --sotu FILE

A task is a text at a budget: two windows of 1536 tokens, as in the first command. What the KV heads
lose is what `kvsearch heads` gives. Writes sums of NLL over blocks of 128 tokens to
records/candidates/TEXT-bBUDGET.json; rows that the file has are kept.
"""

import argparse
import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from candidates import candidates

from kvsearch.commands.heads import heads
from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Policy, layout
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.workloads.text import read_file, tokenize, windows
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
CONTEXT, BLOCK, WINDOWS = 1536, 128, 2
BUDGETS = (128, 64, 256)
PARTS = {"wikitext": "0-300000", "sotu": "0-400000"}  # bytes; of the built-in text its search part
TEXTBOOK = ("h2o+int4-fine", "xmu+int4")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    for text in PARTS:
        ask.add_argument(f"--{text}", type=Path, required=True)
    o = ask.parse_args()
    loaded = load_model()
    evaluator, losses = Evaluator(loaded), heads(loaded).losses
    texts = {t: read_file(f"{getattr(o, t)}:{part}") for t, part in PARTS.items()}
    own = builtin()
    for text, source in {**texts, "builtin": own}.items():
        tokens = tokenize(loaded.tokenizer, source)
        ids = windows(tokens, count=2 * (WINDOWS + 1), length=CONTEXT)[: WINDOWS + 1]
        for budget in BUDGETS:
            size = loaded.shape.budget_bytes(budget)
            setting = Setting(loaded.shape, size, CONTEXT, heads=losses)
            row(evaluator, text, budget, ids[1:], policies(setting))


def policies(setting: Setting) -> dict[str, Policy]:
    """The full cache, textbook combinations and candidates at the setting's budget."""
    found = {"full": Policy(name="full")}
    wanted = {name: METHODS[name].knobs for name in TEXTBOOK}
    for name, knobs in {**wanted, **{n: k for n, (_, k) in candidates().items()}}.items():
        with contextlib.suppress(PolicyError):  # a recent window that the budget does not pay for
            found[name] = build(knobs, setting)
    return found


def row(
    evaluator: Evaluator, text: str, budget: int, ids: np.ndarray, wanted: Mapping[str, Policy]
) -> None:
    """All policies of one task, unless they are there."""
    file = HERE / "records" / "candidates" / f"{text}-b{budget}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    for name, policy in wanted.items():
        if name in kept:
            continue
        found = evaluator.quality(policy, ids, resident=False)
        scored = found.nll[:, budget - 1 :].astype(np.float64)
        sums = np.add.reduceat(scored, np.arange(0, scored.shape[1], BLOCK), axis=1)
        kept[name] = {
            "bytes_peak": layout(policy, evaluator.loaded.shape).bytes_peak(CONTEXT),
            "tokens": scored.shape[1],
            "sums": [[round(float(x), 3) for x in window] for window in sums],
        }
        print(file.stem, name, f"{scored.mean():.4f}", f"{found.seconds:.0f} s", flush=True)
        file.write_text(json.dumps(kept) + "\n", newline="\n")


if __name__ == "__main__":
    main()
