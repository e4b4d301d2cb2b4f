"""Measure every KV head of the default model once, on WikiText-2's search text.

    python studies/2026-11-axes/sensitivity.py --wikitext wikitext2-test.raw

Writes heads.json: the KL divergence with one head starved to 68 slots, and the losses estimated
from gradients at several sizes and bits, with CPU seconds. Entries that the file has are kept.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis.head_losses import starving
from kvsearch.model_analysis.price_by_gradient import price
from kvsearch.models import load_model
from kvsearch.policy import Quantizer
from kvsearch.workloads.text import read_file, tokenize, windows

FILE = Path(__file__).with_name("heads.json")
TOKENS, WINDOW = 2048, 68
SIZES = (20, 36, 68, 132, 260, 516, 1028)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    text = f"{ask.parse_args().wikitext}:0-600000"
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    loaded = load_model()
    evaluator = Evaluator(loaded)
    ids = windows(tokenize(loaded.tokenizer, read_file(text)), count=4, length=TOKENS)

    def keep(name: str, make: Any) -> None:
        if name not in found:
            start = time.process_time()
            found[name] = {"losses": make(), "seconds": round(time.process_time() - start)}
            FILE.write_text(json.dumps(found, indent=1) + "\n", newline="\n")

    keep("measured 0", lambda: rounded(by_age(evaluator, ids[0])))
    for i in range(len(ids)):
        if f"priced slots {i}" not in found:
            prices = price(evaluator, ids[i], sizes=SIZES, quantizer=Quantizer(rotate=True))
            for what in ("slots", "keys", "values"):
                keep(f"priced {what} {i}", lambda p=prices, w=what: flat(getattr(p, w)))


def by_age(evaluator: Evaluator, ids: np.ndarray) -> list[float]:
    """KL divergence with one head after another kept to 4 sinks and the newest 64 tokens."""
    divergence, shape, found = evaluator.divergence(ids[None]), evaluator.loaded.shape, []
    for head in range(shape.layers * shape.kv_heads):
        policy = starving(head, shape, WINDOW, TOKENS)
        lost = divergence.of(policy, same=head // shape.kv_heads)
        found.append(float(lost[:, WINDOW:].mean()))
    return found


def flat(x: np.ndarray) -> list[list[float]]:
    """`[L, H, S]` as a row per head."""
    return [rounded(row) for row in x.reshape(-1, x.shape[-1])]


def rounded(values: Any) -> list[float]:
    """Four digits are more than one window says."""
    return [float(f"{v:.4g}") for v in values]


if __name__ == "__main__":
    main()
