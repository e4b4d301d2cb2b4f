"""losses.csv from records/."""

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
}  # others were looked at in passing


def losses() -> list[dict[str, object]]:
    """A row for every model, task, share of the bytes and way: means over contexts."""
    files = sorted(HERE.glob("records/*.jsonl"))
    rows = [json.loads(x) for f in files for x in f.read_text("utf-8").splitlines()]
    cells: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for r in (r for r in rows if r["way"] in WAYS):  # what was measured twice counts once
        key = r["model"], r["task"], r["tokens"], r["part"], [*WAYS].index(r["way"])
        cells.setdefault(key, {})[r["context"]] = r
    out = []
    for (model, task, tokens, part, way), each in sorted(cells.items()):
        some = [*each.values()]

        def nll(part: int, way: str, some: Any = some, at: Any = (model, task, tokens)) -> float:
            """Of the same contexts."""
            there = cells[(*at, part, [*WAYS].index(way))]
            return _mean([x for r in some for x in there[r["context"]]["nll"]])

        mine, full = _mean([x for r in some for x in r["nll"]]), nll(1, "full")
        row: dict[str, object] = {
            "model": model,
            "task": task,
            "tokens": tokens,
            "bytes": f"1/{part}",
            "slots": some[0]["slots"] or tokens,
            "way": [*WAYS.values()][way],
            "contexts": len(some),
            "asks": sum(len(r["nll"]) for r in some),
            "nll": f"{mine:.3f}",
            "rise": f"{mine - full:+.3f}",
            "exact": sum(sum(r["exact"]) for r in some),
            "won_back": "",
            "fit_of_prompt": "",
        }
        if way > 1:
            evicted = nll(part, "evicted")
            row["won_back"] = f"{(evicted - mine) / (evicted - full):.2f}"
            row["fit_of_prompt"] = f"{_mean([r['fit'] / r['prompt'] for r in some]):.2f}"
            assert not any(r["unfitted"] for r in some)
        out.append(row)
    return out


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out, found, text = ask.parse_args().out, losses(), io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    (out / "losses.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
