"""What budgets per head, bits per layer, AdaKV and token-wise keys are worth, at equal bytes.

    python studies/2026-11-axes/measure.py --wikitext wikitext2-test.raw --sotu sotu.txt \
        [--part report] [--budgets 128 256 384] [--only NAME ...]

Every variant starts from what `studies/2026-11-outcome` found at the budget and changes one axis,
or all; slots are refitted to the same bytes. Writes sums of NLL over blocks of 128 tokens to
records/PART-TEXT-bBUDGET.json; rows that the file has are kept. `--part tune` uses WikiText-2's
select text and sotu's search text, where exponents were chosen.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from variants import variants

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import layout
from kvsearch.policy_space import Setting
from kvsearch.workloads.text import read_file, tokenize, windows

HERE = Path(__file__).parent
CONTEXT, BLOCK = 4096, 128
PARTS = {
    "tune": {"wikitext": ("600000-900000", 2), "sotu": ("0-1500000", 2)},
    "report": {"wikitext": ("900000-1290547", 4), "sotu": ("1500000-3028007", 4)},
}  # bytes of the text, and windows


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    for text in ("wikitext", "sotu"):
        ask.add_argument(f"--{text}", type=Path, required=True)
    ask.add_argument("--part", choices=PARTS, default="report")
    ask.add_argument("--budgets", type=int, nargs="+", default=[256, 128, 384])
    ask.add_argument("--only", nargs="+", default=[])
    o = ask.parse_args()
    loaded = load_model()
    evaluator = Evaluator(loaded)
    for budget in o.budgets:
        setting = Setting(loaded.shape, loaded.shape.budget_bytes(budget), CONTEXT)
        for text, (part, count) in PARTS[o.part].items():
            tokens = tokenize(loaded.tokenizer, read_file(f"{getattr(o, text)}:{part}"))
            ids = windows(tokens, count=count, length=CONTEXT)
            file = HERE / "records" / f"{o.part}-{text}-b{budget}.json"
            for name, make in variants(budget, setting).items():
                if not o.only or name in o.only:
                    measure(name, make, evaluator, ids, budget, file)


def measure(
    name: str,
    make: Callable[[], Any],
    evaluator: Evaluator,
    ids: np.ndarray,
    budget: int,
    file: Path,
) -> None:
    """One row, unless it is there."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    if name in kept:
        return
    policy = make()
    found = evaluator.quality(policy, ids, resident=False)
    scored = found.nll[:, budget - 1 :].astype(np.float64)
    kept[name] = {
        "bytes_peak": layout(policy, evaluator.loaded.shape).bytes_peak(CONTEXT),
        "seconds": round(found.seconds, 1),
        "tokens": scored.shape[1],
        "sums": [[round(float(x), 3) for x in row] for row in blocks(scored)],
    }
    print(file.stem, name, f"{scored.mean():.4f}", f"{found.seconds:.0f} s", flush=True)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(kept) + "\n", newline="\n")


def blocks(nll: np.ndarray) -> np.ndarray:
    """Sums over blocks of `BLOCK` tokens, the last one may have fewer."""
    return np.add.reduceat(nll, np.arange(0, nll.shape[1], BLOCK), axis=1)


if __name__ == "__main__":
    main()
