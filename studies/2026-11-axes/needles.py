"""One needle in 1000 tokens, question last: which policies still find it at 128 slots.

    python studies/2026-11-axes/needles.py --sotu sotu.txt [--count 60] [--only NAME ...]

A seven-digit number stands somewhere in prose of the report text; the question follows at the end.
Exact match: every digit is the model's first choice, given the ones before it. Writes one row a
policy to needles.csv: shares with Wilson intervals, and the mean NLL of the answer in nats.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
import torch
from variants import variants

from kvsearch.cache import PolicyCache
from kvsearch.models import load_model
from kvsearch.models.head import Head
from kvsearch.policy_space import Setting
from kvsearch.workloads.text import read_file, tokenize, windows

HERE = Path(__file__).parent
TOKENS, BUDGET = 1000, 128
NEEDLE = " The secret number of the archive is {}. Remember it."
QUESTION = (
    "\n\nQuestion: What is the secret number of the archive?\n"
    "Answer: The secret number of the archive is"
)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--count", type=int, default=60)
    ask.add_argument("--only", nargs="+", default=[])
    o = ask.parse_args()
    loaded = load_model()
    head, encode = Head(loaded.model), loaded.tokenizer.encode
    text = tokenize(loaded.tokenizer, read_file(f"{o.sotu}:1500000-3028007"))
    prose = windows(text, count=o.count, length=TOKENS)
    draw = np.random.default_rng(0)
    tasks = []
    for i in range(o.count):
        number = "".join(str(d) for d in draw.integers(0, 10, 7))
        at = int(draw.uniform(0.05, 0.8) * TOKENS)
        needle, question = encode(NEEDLE.format(number)), encode(QUESTION)
        answer = encode(f" {number}")
        ids = [*prose[i][:at], *needle, *prose[i][at:], *question, *answer]
        tasks.append((torch.tensor([ids]), len(answer)))
    setting = Setting(loaded.shape, loaded.shape.budget_bytes(BUDGET), TOKENS + 64)
    kept = read(HERE / "needles.csv")
    for name, make in variants(BUDGET, setting).items():
        if (o.only and name not in o.only) or name in kept:
            continue
        policy, hits, lost = make(), 0, 0.0
        for ids, n in tasks:
            with torch.inference_mode():
                cache = PolicyCache(policy, loaded.model, packed=False)
                hidden = head.hidden(ids, cache)[:, -n - 1 : -1]
                log = head.logits(hidden)[0].log_softmax(-1)
            hits += bool((log.argmax(-1) == ids[0, -n:]).all())
            lost -= float(log.gather(-1, ids[0, -n:, None]).sum())
        low, high = wilson(hits, o.count)
        kept[name] = {
            "policy": name, "n": o.count, "exact": f"{hits / o.count:.2f}", "lo": f"{low:.2f}",
            "hi": f"{high:.2f}", "answer_nll": f"{lost / o.count / 7:.3f}",
        }  # fmt: skip
        print(kept[name], flush=True)
        with (HERE / "needles.csv").open("w", newline="") as f:
            out = csv.DictWriter(f, kept[name].keys(), lineterminator="\n")
            out.writeheader()
            out.writerows(kept.values())


def read(file: Path) -> dict[str, dict[str, object]]:
    """Rows that are there, by policy."""
    if not file.exists():
        return {}
    with file.open() as f:
        return {row["policy"]: dict(row) for row in csv.DictReader(f)}


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share of `n`."""
    p, d = hits / n, 1 + z * z / n
    middle, half = p + z * z / 2 / n, z * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return float((middle - half) / d), float((middle + half) / d)


if __name__ == "__main__":
    main()
