"""From the answers' losses to tables; `python derive.py --out FOLDER`.

`gates.csv`: what the context is worth on each task; a task counts where it helps certainly, and by
0.2 nats a token. `cells.csv`: share of the context lost, and of answers that are exact, a row per
task, share of the bytes and policy. `comparisons.csv`: of each cell, ours (the best of the points
that every search begins with, and what searches found) against the best published method, and what
searches on the task found (`-once`: without KVzip in our bits) against the best such point, that
combination and each other; shares of the context lost, paired, negative where the first is better.
`text.csv`: what they lose on text, nats per token. Intervals
are 95 % and count contexts, or windows, as independent.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measure import KVZIP, PUBLISHED

from kvsearch.results.intervals import clustered, wilson
from kvsearch.results.records import Interval
from kvsearch.session.context_worth import GATE

HERE = Path(__file__).parent
Cell = dict[str, dict[str, list[float]]]


def columns(name: str, x: Interval) -> dict[str, object]:
    """A value and its interval."""
    found = {name: x.mean, f"{name}_lo": x.lo, f"{name}_hi": x.hi}
    return {column: f"{value:.3f}" for column, value in found.items()}


def tables() -> dict[str, list[dict[str, object]]]:
    gates, cells, compared = [], [], []
    for file in sorted((HERE / "records").glob("*-*.json")):
        task, see, *other = file.stem.split("-", 2)
        which = {"model": other[0] if other else "smollm2-135m", "task": task, "see": see}
        rows = json.loads(file.read_text())
        groups, nll = rows.pop("groups"), rows.pop("all")
        full, empty = (np.array(nll[name]["nll"]) for name in ("full", "empty"))
        gain = clustered(empty - full, groups)
        exact = wilson(sum(nll["full"]["exact"]), len(full))
        passes = gain.mean >= GATE and gain.lo > 0
        gates.append({
            **which, "contexts": len({*groups}), "asks": len(full),
            "nll_full": f"{full.mean():.3f}", "nll_empty": f"{empty.mean():.3f}",
            **columns("gain", gain),
            **columns("exact", exact),
            "passes": passes,
        })  # fmt: skip
        for share, cell in rows.items() if passes else ():
            lost = {n: (np.array(r["nll"]) - full) / gain.mean for n, r in cell.items()}
            where = {**which, "bytes": share}
            for name in sorted(cell, key=lambda n: float(lost[n].mean())):
                kept = wilson(sum(cell[name]["exact"]), len(full))
                cells.append({
                    **where, "policy": name, "bytes_peak": cell[name]["bytes_peak"],
                    **columns("lost", clustered(lost[name], groups)),
                    **columns("exact", kept),
                })  # fmt: skip
            compared += [{**where, **row} for row in comparisons(task, lost, groups)]
    found = {"gates.csv": gates, "cells.csv": cells, "comparisons.csv": compared}
    return {**found, "text.csv": list(on_text())}


def on_text() -> Iterator[dict[str, object]]:
    """What policies lose on windows of a text, above the full cache and above `found on text`."""
    file = HERE / "records" / "text.json"
    for share, cell in (json.loads(file.read_text()) if file.exists() else {}).items():
        nll = {name: np.array(row) for name, row in cell.items()}
        windows = [str(i) for i in range(len(nll["full"]))]
        for name in sorted(nll, key=lambda n: float(nll[n].mean())):
            lost = clustered(nll[name] - nll["full"], windows)
            row = {"bytes": share, "policy": name, "windows": len(windows), **columns("dnll", lost)}
            if "found on text" in nll:
                row |= columns("to_text", clustered(nll[name] - nll["found on text"], windows))
            yield row


def comparisons(
    task: str, lost: dict[str, np.ndarray], groups: list[str]
) -> Iterator[dict[str, object]]:
    """The rows of one cell."""

    def best(names: list[str]) -> str | None:
        return min(names, key=lambda n: float(lost[n].mean()), default=None)

    points = best([n for n in lost if n.startswith("earlier-")])
    found, once = f"found on {task}", f"found on {task}-once"
    ours = best([n for n in (found, once) if n in lost]) or points
    pairs = [
        ("ours, best published method", ours, best([n for n in lost if n in PUBLISHED])),
        ("found on the task, best point", found, points),
        ("found on the task, KVzip in our bits", found, KVZIP),
        ("found on the task, without starting from KVzip", found, once),
        ("found without starting from KVzip, best point", once, points),
        ("found without starting from KVzip, on text", once, "found on text"),
        ("KVzip in our bits, best point", KVZIP, points),
    ]
    for what, one, other in pairs:
        if one in lost and other in lost:
            d = clustered(lost[one] - lost[other], groups)
            yield {
                "what": what, "policy": one, "against": other,
                "lost": f"{lost[one].mean():.3f}", "against_lost": f"{lost[other].mean():.3f}",
                **columns("difference", d),
            }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables().items():
        if rows:
            with open(out / name, "w", newline="") as f:
                table = csv.DictWriter(f, rows[0], lineterminator="\n")
                table.writeheader()
                table.writerows(rows)


if __name__ == "__main__":
    main()
