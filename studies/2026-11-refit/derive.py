"""losses.csv from records/, and ways.csv from records/ridge-0.001/, where what is built was chosen.

python derive.py [--out FOLDER]
"""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WAYS = {
    "full": "full cache",
    "evicted": "evicted",
    "second reading": "fitted",
    "second reading alone": "fitted, the prompt's slots alone",
    "own alone": "to the prompt's queries, alone",
    "own causal alone": "the same, each sees what it saw",
    "own last 128 alone": "to the last 128 of these, alone",
    "own": "to the prompt's queries, with the prompt beside",
    "both alone": "to both, alone",
    "bias": "fitted, biases",
    "bias in keys": "fitted, biases in keys",
    "evicted, by pursuit": "evicted by matching pursuit",
    "second reading, by pursuit": "the same, fitted",
    "bias in keys, by pursuit": "the same, biases in keys",
}  # others were looked at in passing


def losses(pattern: str) -> list[dict[str, object]]:
    """A row for every model, task, bits, share of the bytes and way: means over contexts."""
    files = sorted(HERE.glob(f"records/{pattern}.jsonl"))
    rows = [json.loads(x) for f in files for x in f.read_text("utf-8").splitlines()]
    cells: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for r in (r for r in rows if r["way"] in WAYS):  # what was measured twice counts once
        bits = "k16v16" if r["part"] == 1 else r.get("bits", "k5v4")
        key = r["model"], r["task"], r["tokens"], r["part"], bits, [*WAYS].index(r["way"])
        cells.setdefault(key, {})[r["context"]] = r
    out = []
    for (model, task, tokens, part, bits, way), each in sorted(cells.items()):
        some = [*each.values()]

        def nll(*which: Any, some: Any = some, at: Any = (model, task, tokens)) -> float:
            """Of the same contexts."""
            there = cells[(*at, *which)]
            return _mean([x for r in some for x in there[r["context"]]["nll"]])

        mine, full = _mean([x for r in some for x in r["nll"]]), nll(1, "k16v16", 0)
        row: dict[str, object] = {
            "model": model,
            "task": task,
            "tokens": tokens,
            "bytes": f"1/{part}",
            "bits": bits,
            "slots": some[0]["slots"] or tokens,
            "way": [*WAYS.values()][way],
            "contexts": len(some),
            "asks": sum(len(r["nll"]) for r in some),
            "nll": f"{mine:.3f}",
            "rise": f"{mine - full:+.3f}",
            "kl": f"{_mean([x for r in some for x in r['kl']]):.4f}"
            if all(r.get("kl") for r in some)
            else "",
            "exact": sum(sum(r["exact"]) for r in some),
            "won_back": "",
            "fit_of_prompt": "",
            "heads_left": "",
        }
        if way > 1:
            evicted = nll(part, bits, 1)
            row["won_back"] = f"{(evicted - mine) / (evicted - full):.2f}"
            row["fit_of_prompt"] = f"{_mean([r['fit'] / r['prompt'] for r in some]):.2f}"
            if WAYS[[*WAYS][way]] != "fitted, biases":  # measured without the guard
                row["heads_left"] = f"{_mean([r['unfitted'] for r in some]):.1f}"
        out.append(row)
    return out


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    for name, pattern in (("losses.csv", "*"), ("ways.csv", "ridge-0.001/*")):
        found, text = losses(pattern), io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        (out / name).write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
