"""From the records to the tables. `python derive.py --out FOLDER`.

`controls.csv`: the first point of the portfolio at 128 slots with head budgets from different
measurements, dNLL to the full cache a text, means of two windows.
"""

import argparse
import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent


def rows(name: str) -> dict[tuple[object, ...], dict[str, object]]:
    """Key -> record of one file; nothing where it was not measured yet."""
    file = HERE / "records" / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {tuple(row["key"]): row for row in map(json.loads, lines)}


def controls() -> list[dict[str, object]]:
    """A row a measurement, a column a text, nats per token after the 128th."""
    found = rows("controls-smollm2-135m")
    losses: dict[str, dict[str, float]] = defaultdict(dict)
    for (text, slots, kind), row in found.items():
        if not slots:
            continue
        mine, full = row["sums"], found[text, 0, "full"]["sums"]
        tokens = row["tokens"]["128"]
        gaps = [(a - b) / tokens for a, b in zip(mine["128"], full["128"], strict=True)]
        losses[kind][text] = fmean(gaps)
    return [
        {
            "heads": kind,
            **{t: f"{x:.4f}" for t, x in each.items()},
            "mean": f"{fmean(each.values()):.4f}",
        }
        for kind, each in losses.items()
    ]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    for name, table in {"controls.csv": controls()}.items():
        with open(o.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
