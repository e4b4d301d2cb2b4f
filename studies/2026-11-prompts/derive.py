"""results.csv and memory.csv of what `measure.py` and `memory.py` have kept.

    python derive.py --out FOLDER

A ratio is of the CPU seconds of a pair; the table has its median, lowest and highest. Of memory it
has what was needed beside the budget and what the model needs anyway, in dense copies of a layer.
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from cases import NAMES, PARTS

HERE = Path(__file__).parent
Rows = list[dict[str, str]]


def records(kind: str) -> dict[tuple[str, str], Rows]:
    """Rows by policy and part, in the order of the methods."""
    rows = [
        row
        for file in sorted(HERE.glob(f"records/{kind}-*.csv"))
        for row in csv.DictReader(file.open(newline=""))
    ]
    every = [(name, part) for name in NAMES for part in PARTS]
    found = {at: [r for r in rows if (r["policy"], r["part"]) == at] for at in every}
    return {at: some for at, some in found.items() if some}


def speed(some: Rows) -> dict[str, str]:
    """One row of results.csv."""
    mine, theirs = (
        np.array([float(r[f"{who}_cpu_s"]) for r in some]) for who in ("deployed", "evaluator")
    )
    ratio = mine / theirs
    return {
        "policy": some[0]["policy"], "part": some[0]["part"], "tokens": some[0]["tokens"],
        "pairs": str(len(some)), "deployed_cpu_s": f"{np.median(mine):.2f}",
        "evaluator_cpu_s": f"{np.median(theirs):.2f}", "ratio": f"{np.median(ratio):.2f}",
        "lowest": f"{ratio.min():.2f}", "highest": f"{ratio.max():.2f}",
    }  # fmt: skip


def memory(some: Rows) -> dict[str, str]:
    """One row of memory.csv, from the newest measurement."""
    row = some[-1]
    peak, nothing, budget, copy = (
        int(row[f"{key}_bytes"]) for key in ("peak", "nothing", "budget", "dense_copy")
    )
    kept = {key: row[key] for key in row if key not in ("torch", "date")}
    return kept | {"copies": f"{(peak - nothing - budget) / copy:.2f}"}


def main() -> None:
    """Write both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    out: Path = parser.parse_args().out
    for name, kind, line in (("results", "speed", speed), ("memory", "memory", memory)):
        table = [line(some) for some in records(kind).values()]
        if table:
            text = [",".join(table[0]), *(",".join(row.values()) for row in table)]
            (out / f"{name}.csv").write_bytes(("\n".join(text) + "\n").encode())


if __name__ == "__main__":
    main()
