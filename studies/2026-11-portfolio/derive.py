"""From losses of candidates on tasks to the portfolio, and its worth where it was not learned.

`points.csv`, what `kvsearch/policy_search/portfolio.yaml` ships; `losses.csv`, every candidate on
every task; `another-model.csv`, the shipped points on a model that none of them was found on;
`left-out.csv`, what portfolios learned on the other texts, or at the other budget, reach.
`python derive.py --out FOLDER`.

A portfolio is learned greedily: each next point lowers the mean over tasks of the best point's loss
the most. On a task left out its points are compared on one window and judged on the other, and the
other way round, as a search would do; so are the textbook combinations.
"""

import argparse
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from candidates import candidates

HERE = Path(__file__).parent
TEXTBOOK = ("h2o+int4-fine", "xmu+int4")
POINTS = 4  # of a portfolio at most
GAIN = 0.001  # nats per token by which a point must lower the mean; windows say no less


@dataclass(frozen=True)
class Task:
    """A text at a budget: loss over the full cache of every policy on each window."""

    text: str
    budget: int
    losses: dict[str, tuple[float, ...]]

    def mean(self, name: str) -> float:
        """Nats per token; what cannot be built at the budget is of no use there."""
        return fmean(self.losses[name]) if name in self.losses else float("inf")

    def chosen(self, names: Sequence[str]) -> float:
        """Loss on one window of what was best on the other, over both ways round."""
        there = [n for n in names if n in self.losses]
        found = []
        for judged in range(2):
            best = min(there, key=lambda n: self.losses[n][1 - judged])
            found.append(self.losses[best][judged])
        return fmean(found)


def tasks(model: str = "") -> list[Task]:
    """Of SmolLM2-135M, or of another model."""
    found = []
    for file in sorted((HERE / "records" / model).glob("*-b*.json")):
        text, _, budget = file.stem.rpartition("-b")
        rows = json.loads(file.read_text())
        full = np.array(rows["full"]["sums"]).sum(1)
        losses = {
            name: tuple((np.array(row["sums"]).sum(1) - full) / row["tokens"])
            for name, row in rows.items()
        }
        found.append(Task(text, int(budget), losses))
    return found


def learned(on: Sequence[Task]) -> list[str]:
    """Names of the points, the most useful one first."""
    points: list[str] = []
    before = float("inf")
    while len(points) < POINTS:
        means = {
            name: fmean(min(t.mean(p) for p in [*points, name]) for t in on)
            for name in candidates()
            if name not in points
        }
        best = min(means, key=lambda n: means[n])
        if means[best] > before - GAIN:
            break
        points.append(best)
        before = means[best]
    return points


def tables() -> dict[str, list[dict[str, object]]]:
    every = tasks()
    losses, other = (
        [
            {"text": t.text, "budget": t.budget, "policy": n, "dnll": f"{t.mean(n):.4f}",
             "windows": " ".join(f"{x:.4f}" for x in t.losses[n])}
            for t in some for n in t.losses if n != "full"
        ]
        for some in (every, tasks("gemma3-270m"))
    )  # fmt: skip
    left = []
    for what in ("text", "budget"):
        for out in sorted({getattr(t, what) for t in every}):
            points = learned([t for t in every if getattr(t, what) != out])
            for t in every:
                if getattr(t, what) == out:
                    left.append({
                        "left_out": what, "text": t.text, "budget": t.budget,
                        "portfolio": "; ".join(points), "dnll": f"{t.chosen(points):.4f}",
                        "first_point": f"{t.chosen(points[:1]):.4f}",
                        "textbook": f"{t.chosen(TEXTBOOK):.4f}",
                        "any_candidate": f"{t.chosen([*candidates()]):.4f}",
                    })  # fmt: skip
    points = [
        {"name": f"earlier-{i}", "candidate": n, "source": candidates()[n][0],
         "knobs": json.dumps(candidates()[n][1])}
        for i, n in enumerate(learned(every), 1)
    ]  # fmt: skip
    return {
        "points.csv": points, "losses.csv": losses, "left-out.csv": left,
        "another-model.csv": other,
    }  # fmt: skip


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    for name, rows in tables().items():
        with open(o.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
