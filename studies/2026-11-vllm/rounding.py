"""What rounding alone does to the loss of a policy: the same evaluation with other last bits.

    python rounding.py --text wikitext2-test.raw

Every weight is multiplied by 1 or by a neighbour of 1 in fp32, another draw for each seed: as much
as another order of sums changes. Losses less those with the weights as they are, on two windows of
256 tokens. Writes rounding.json.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from measure import FOUR, POLICIES

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Policy
from kvsearch.workloads.text import read_file, tokenize, windows

HERE = Path(__file__).parent
SEEDS = 6


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", required=True)
    loaded = load_model()
    ids = windows(tokenize(loaded.tokenizer, read_file(ask.parse_args().text)), count=2, length=256)
    found: dict[str, list[dict[str, float]]] = {}
    asked = {
        "scored-per-layer": POLICIES["scored-per-layer"],
        "zoo-b256": POLICIES["zoo-b256"],
        "every token, rotated 4 bits": FOUR | {"interval": 16},
    }
    policies = {name: Policy.build(fields) for name, fields in asked.items()}
    given = [p.detach().clone() for p in loaded.model.parameters()]
    first = {n: Evaluator(loaded).quality(p, ids, resident=False).nll for n, p in policies.items()}
    for seed in range(SEEDS):
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p, w in zip(loaded.model.parameters(), given, strict=True):
                last = torch.randint(-1, 2, w.shape, generator=draw) * torch.finfo(w.dtype).eps
                p.copy_(w * (1 + last))
        for name, policy in policies.items():
            off = Evaluator(loaded).quality(policy, ids, resident=False).nll - first[name]
            row = {"mean": float(off.mean()), "each": float(np.abs(off).mean())}
            found.setdefault(name, []).append({k: round(v, 6) for k, v in row.items()})
            print(seed, name, found[name][-1], flush=True)
    out = {"tokens": int(next(iter(first.values())).size), "off": found}
    (HERE / "rounding.json").write_text(json.dumps(out, indent=1) + "\n", newline="\n")


if __name__ == "__main__":
    main()
