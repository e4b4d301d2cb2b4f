"""Draw `volume.png` from the tables: volume on the report text against search tokens.

python studies/2026-11-search-efficiency/figure.py
"""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
COLOURS = {
    "kvei": "#bb3355", "kvei0": "#e8a0b4", "tpe": "#004488", "gp": "#117733",
    "random": "#777777", "nsga2": "#a37200",
}  # fmt: skip
STYLES = {"warm-race": "-", "warm-full": "--", "cold-race": ":", "cold-full": "-."}


def main() -> None:
    lines = defaultdict(list)
    with (HERE / "live-summary.csv").open() as f:
        for r in csv.DictReader(f):
            mean = float(r["volume_report"])
            half = float(r["hi"] or mean) - mean
            lines[r["contender"]].append((float(r["tokens"]) / 1e3, mean, half, r["seeds"]))
    fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in sorted(lines.items()):
        sampler, kind = name.split("-", 1)
        x, y, half, seeds = zip(*sorted(points), strict=True)
        ax.errorbar(
            x, y, yerr=half, color=COLOURS[sampler], linestyle=STYLES[kind], capsize=2,
            linewidth=1.6, elinewidth=0.7,
            label=f"{sampler}, {kind.replace('-', ', ')} ({max(seeds)})",
        )  # fmt: skip
    ax.set_xlabel("search tokens evaluated, thousands")
    ax.set_ylabel(
        "hypervolume of the reported set, report text\n(decades of bytes x decades of loss)"
    )
    ax.set_title(
        "Mean over seeds (number in brackets), bars: 95 % intervals of the mean", fontsize=10
    )
    ax.legend(fontsize=8, frameon=False, ncols=2)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(HERE / "volume.png", dpi=130)


if __name__ == "__main__":
    main()
