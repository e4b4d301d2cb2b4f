"""From the records to tables; `python derive.py --out FOLDER`.

`check.csv`: the harness against the package. `screen.csv`: every way to merge, on a context of the
search part. `merge.csv`: those that were chosen, on the report part; `sizes.csv`: one of them with
more and fewer slots; `bits.csv`: at an eighth of the bytes; `mix.csv`: single rules and rules by
head. *Difference* is to plain eviction of the same slots, or of a mix to the single rule that loses
least, paired, negative where less is lost. `heads.csv`: in how many heads a rule loses least, and
what all heads lose, each alone, by one rule and by the best of each. Of a task, losses are shares
of what the context is worth (0 the full cache, 1 no context), of `text` nats per token above the
full cache. Intervals are 95 % and count contexts as independent.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import RULES

from kvsearch.results.intervals import clustered
from kvsearch.results.records import Interval

HERE = Path(__file__).parent
Row = dict[str, Any]


def read(step: str) -> Iterator[tuple[str, Row]]:
    """Records of a step, by task."""
    for file in sorted((HERE / "records").glob(f"{step}-*.json")):
        yield file.stem.removeprefix(f"{step}-"), json.loads(file.read_text())


def columns(name: str, x: Interval) -> Row:
    """A value and its interval, empty for a single context."""
    found = {name: x.mean, f"{name}_lo": x.lo, f"{name}_hi": x.hi}
    return {column: "" if np.isnan(v) else f"{v:.4f}" for column, v in found.items()}


def compared(step: str) -> Iterator[Row]:
    """What every way loses, and against what it is compared."""
    for task, rows in read(step):
        keys = sorted((k for k in rows if k.isdigit()), key=int)
        groups = [k for k in keys for _ in rows[k]["full"][0]]
        names = list(rows[keys[0]])

        def of(name: str, which: int = 0, rows: Row = rows, keys: list[str] = keys) -> np.ndarray:
            return np.array([x for k in keys for x in rows[k][name][which]])

        empty = np.array(rows.get("empty", [0.0] * len(groups)))[: len(groups)]
        worth = (empty - of("full")).mean() if "empty" in rows else 1.0
        lost = {n: (of(n) - of("full")) / worth for n in names}
        for name in names:
            base = against(name, lost)
            row = {
                "task": task, "way": name, "contexts": len(keys), "asks": len(groups),
                "exact": int(of(name, 1).sum()) if "empty" in rows else "",
                **columns("lost", clustered(lost[name], groups)), "against": base or "",
            }  # fmt: skip
            d = clustered(lost[name] - lost[base], groups) if base else None
            yield row | (columns("difference", d) if d else NOTHING)


NOTHING: Row = dict.fromkeys(("difference", "difference_lo", "difference_hi"), "")


def against(name: str, lost: dict[str, np.ndarray]) -> str | None:
    """With what a way is compared."""
    kept_set, _, way = name.partition(": ")
    if way:
        return None if way == "evicted" else f"{kept_set}: evicted"
    some = RULES[:-1] if "one reading" in name else RULES
    singles = [f"{rule} in every head" for rule in some]
    return min(singles, key=lambda n: float(lost[n].mean())) if name.startswith("mixed") else None


def of_heads() -> Iterator[Row]:
    """Rules of heads, task by task: in how many each loses least, and sums over all heads."""
    for task, rows in read("heads"):
        each = np.array([rows[k]["kl"] for k in sorted(rows, key=int)])  # [contexts, L, H, rules]
        each = each.reshape(len(each), -1, each.shape[-1])
        each = each[:, (each > 0).any((0, 2))]  # heads with a choice
        mean, n = each.mean(0), len(each)
        best, head = mean.argmin(1), np.arange(mean.shape[0])
        for i, rule in enumerate(RULES):
            yield {
                "task": task, "contexts": n, "rule": rule, "heads": int((best == i).sum()),
                "kl": f"{mean[:, i].sum():.4f}",
            }  # fmt: skip
        yield {
            "task": task, "contexts": n, "rule": "best of each head", "heads": "",
            "kl": f"{mean.min(1).sum():.4f}",
        }  # fmt: skip
        if n > 1:  # chosen on the other contexts
            picks = [each[np.arange(n) != c].mean(0).argmin(1) for c in range(n)]
            kl = np.mean([each[c, head, pick].sum() for c, pick in enumerate(picks)])
            yield {
                "task": task, "contexts": n, "rule": "best by the others", "heads": "",
                "kl": f"{kl:.4f}",
            }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    tables = {
        "check.csv": json.loads((HERE / "records" / "check.json").read_text()),
        "screen.csv": list(compared("screen")),
        "merge.csv": list(compared("merge")),
        "sizes.csv": list(compared("sizes")),
        "bits.csv": list(compared("bits")),
        "mix.csv": list(compared("mix")),
        "heads.csv": list(of_heads()),
    }
    for name, rows in tables.items():
        if rows:
            with open(out / name, "w", newline="") as f:
                table = csv.DictWriter(f, rows[0], lineterminator="\n")
                table.writeheader()
                table.writerows(rows)


if __name__ == "__main__":
    main()
