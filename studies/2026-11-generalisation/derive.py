"""Gains of the recommended policies on eight windows: `gains.csv`; `python derive.py --out FOLDER`.

Gains are in nats per token, above 0 where the recommended policy is better, with 95 % intervals
from Student's t over the eight windows; those of `all` are over the means of the texts.
`search_gain` is the gain on the windows of the search text that both policies have.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np

from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, common, paired
from kvsearch.results.student_t import quantile

HERE = Path(__file__).parent
RECORDS = HERE.parent / "2026-11-first-command" / "four-windows"
ROLES = ("published", "combination", "portfolio")


def losses(file: Path) -> tuple[dict[str, str], dict[str, Blocks]]:
    """Name and losses `[windows, 1]` of each role."""
    names: dict[str, str] = {}
    sums: dict[str, list[float]] = {}
    with file.open(newline="") as f:
        for row in csv.DictReader(f):
            names[row["role"]], tokens = row["policy"], int(row["tokens"])
            sums.setdefault(row["role"], []).append(float(row["nats"]))
    return names, {k: Blocks(np.array([v]).T, np.array([tokens])) for k, v in sums.items()}


def search_gain(text: str, mine: str, its: str) -> float:
    """Gain on the search text."""
    run = RunFolder(RECORDS / text, write=False)
    start = json.loads((run.path / "study.json").read_text())["settings"]["score_from"] - 1
    keys = {t.name: t.fingerprint for t in run.trials()}
    a, b = common(*(run.losses("search", keys[name], start) for name in (its, mine)))
    return paired(a, b).mean


def rows() -> list[dict[str, object]]:
    """A row per text and opponent, and one per opponent over all texts."""
    out: list[dict[str, object]] = []
    means: dict[str, list[tuple[float, float]]] = {role: [] for role in ROLES}
    for file in sorted((HERE / "losses").glob("*.csv")):
        names, found = losses(file)
        for role in ROLES:
            mine, its = names["recommended"], names[role]
            row: dict[str, object] = {"text": file.stem, "recommended": mine, "role": role}
            if mine == its:
                out.append(row | {"opponent": its})
                means[role].append((0.0, 0.0))
                continue
            gain = paired(found[role], found["recommended"])
            before = search_gain(file.stem, mine, its)
            means[role].append((gain.mean, before))
            out.append(row | {"opponent": its} | shown(gain.mean, gain.lo, gain.hi, before))
    for role, pairs in means.items():
        each = np.array(pairs)
        half = quantile(0.975, len(each) - 1) * each[:, 0].std(ddof=1) / len(each) ** 0.5
        mean, before = each.mean(0)
        texts = {"text": "all", "recommended": f"{len(each)} texts", "role": role, "opponent": ""}
        out.append(texts | shown(mean, mean - half, mean + half, before))
    return out


def shown(mean: float, lo: float, hi: float, before: float) -> dict[str, object]:
    """Columns of a gain."""
    numbers = {"gain": mean, "lo": lo, "hi": hi, "search_gain": before}
    return {k: f"{v:.4f}" for k, v in numbers.items()}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    columns = ("text", "recommended", "role", "opponent", "gain", "lo", "hi", "search_gain")
    with open(o.out / "gains.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows())


if __name__ == "__main__":
    main()
