"""What stays of a text and its facts as contexts grow and budgets shrink, from `records`.

    python derive.py [--out FOLDER]

`lengths.csv`: a row a model, context, budget and policy, means over the texts that it has: rise of
the text's NLL, NLL of the answers, facts answered exactly and how many the full cache answers, and
the share of the budget that a question with its answer takes in 16 bits.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent


def rows() -> list[dict[str, object]]:
    """Of `records/CONTEXT-BUDGET/MODEL.jsonl`."""
    found = []
    for file in sorted(HERE.glob("records/*/*.jsonl")):
        context, budget = map(int, file.parent.name.split("-"))
        lines = [json.loads(x) for x in file.read_text().splitlines()]
        full = {x["key"][0]: x for x in lines if x["key"][2] == "full"}
        for policy in dict.fromkeys(x["key"][2] for x in lines):
            mine = [x for x in lines if x["key"][2] == policy]
            theirs = [full[x["key"][0]] for x in mine]
            ask = float(np.mean([x["ask_tokens"] for x in mine]))
            found.append({
                "model": file.stem, "context": context, "budget": budget,
                "of_the_bytes": "1" if policy == "full" else f"1/{context // budget}",
                "ask_of_budget": f"{ask / budget:.2f}",
                "policy": policy, "texts": len(mine),
                "dnll": f"{_mean(mine, 'text') - _mean(theirs, 'text'):.4f}",
                "facts_nll": f"{_mean(mine, 'facts'):.3f}",
                "full_facts_nll": f"{_mean(theirs, 'facts'):.3f}",
                "exact": sum(sum(x["exact"]) for x in mine),
                "full_exact": sum(sum(x["exact"]) for x in theirs),
                "asks": sum(sum(x["asks"]) for x in mine),
            })  # fmt: skip
    return found


def _mean(records: list[dict], field: str) -> float:
    return float(np.mean([np.mean(x[field]) for x in records]))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out, found = ask.parse_args().out, rows()
    with open(out / "lengths.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
