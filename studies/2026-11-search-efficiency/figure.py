"""Draw the tables: live runs, six texts, and runs on the surrogate.

python studies/2026-11-search-efficiency/figure.py
"""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLOURS = {
    "kvei": "#bb3355", "kvei_layers": "#d0708a", "kvei_sweep": "#e8a0b4", "kvei_nosweep": "#f0c0d0",
    "tpe": "#004488",
    "gp": "#117733", "random": "#777777", "nsga2": "#a37200",
}  # fmt: skip
STYLES = {"warm-race": "-", "warm-full": "--", "cold-race": ":", "cold-full": "-."}
MARKERS = {"warm-race": "o", "warm-full": "s", "cold-race": "^", "cold-full": "v"}
VOLUME = "hypervolume of the reported set, report text\n(decades of bytes x decades of loss)"

DEFAULT, TRIALS = "kvei-warm-race", 60  # the reference line
SAMPLERS = ("kvei", "tpe", "gp", "random", "nsga2")
SIDES = (-0.24, -0.08, 0.08, 0.24)  # offsets of the four combinations of start and races


def live() -> None:
    """Volume on the report text against search tokens: the contenders of several seeds."""
    lines = defaultdict(list)
    for r in _runs("live-summary.csv"):
        if int(r["seeds"]) > 1 and r["contender"].endswith(("warm-race", "cold-full")):
            mean = float(r["volume_report"])
            half = float(r["hi"] or mean) - mean
            lines[r["contender"]].append((float(r["tokens"]) / 1e3, mean, half, r["seeds"]))
    fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in sorted(lines.items()):
        x, y, half, seeds = zip(*sorted(points), strict=True)
        ax.errorbar(x, y, yerr=half, capsize=2, elinewidth=0.7, **_look(name, max(seeds)))
    ax.set_xlabel("search tokens evaluated, thousands")
    ax.set_ylabel(VOLUME)
    ax.set_title(
        "Mean over seeds (number in brackets), bars: 95 % intervals of the mean", fontsize=10
    )
    _save(fig, "volume.png")


def cells() -> None:
    """Every sampler cold and warm, with and without races: volume at the end, a dot per seed."""
    fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    for side, (kind, marker) in zip(SIDES, MARKERS.items(), strict=True):
        found = [
            (SAMPLERS.index(r["contender"].split("-")[0]) + side, float(r["volume_report"]))
            for r in _runs("live.csv")
            if r["mark"] == "end" and r["contender"] in [f"{s}-{kind}" for s in SAMPLERS]
        ]
        x, y = zip(*found, strict=True)
        ax.plot(x, y, marker, color="#335577", label=kind.replace("-", ", "))
    ax.set_xticks(range(len(SAMPLERS)), SAMPLERS)
    ax.set_ylabel(VOLUME)
    ax.set_title("At the end: 60 policies, NSGA-II 100; a mark per seed", fontsize=10)
    _save(fig, "cells.png")


def _runs(file: str) -> list[dict[str, str]]:
    """Rows of the first text with layer sensitivity as a rise in NLL."""
    with (HERE / file).open() as f:
        return [r for r in csv.DictReader(f) if "_kl" not in r["contender"]]


Lines = dict[str, list[tuple[int, float, float, float, int]]]


def on_the_surrogate() -> Lines:
    """Contender -> policies evaluated, volume, its interval, seeds."""
    lines: Lines = defaultdict(list)
    with (HERE / "simulated.csv").open() as f:
        for r in csv.DictReader(f):
            mean, lo, hi = (float(r[k] or r["volume"]) for k in ("volume", "lo", "hi"))
            lines[r["contender"]].append((int(r["evaluated"]), mean, lo, hi, int(r["seeds"])))
    return lines


def simulated_cells(lines: Lines) -> None:
    """Every sampler cold and warm, with and without races, after as many policies for all."""
    fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
    for side, (kind, marker) in zip(SIDES, MARKERS.items(), strict=True):
        found = [
            (SAMPLERS.index(name.split("-")[0]) + side, *p[1:4])
            for name, points in lines.items()
            for p in points
            if p[0] == TRIALS and name in [f"{s}-{kind}" for s in SAMPLERS]
        ]
        x, mean, lo, hi = np.array(found).T
        ax.errorbar(
            x, mean, yerr=[mean - lo, hi - mean], fmt=marker, color="#335577", capsize=2,
            label=kind.replace("-", ", "),
        )  # fmt: skip
    ax.set_xticks(range(len(SAMPLERS)), SAMPLERS)
    ax.set_ylabel("true hypervolume of the reported set, surrogate\n(decades of bytes x of loss)")
    ax.set_title(
        f"Simulated, after {TRIALS} policies: mean of 20 seeds, 95 % interval", fontsize=10
    )
    _save(fig, "simulated-cells.png")


def simulated(lines: Lines) -> None:
    """Volume on the surrogate against policies: contenders beyond 60, and versions of kvei."""
    fig, ax = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in sorted(lines.items()):
        if max(points)[0] == TRIALS and "_" not in name:
            continue
        x, y, lo, hi, seeds = zip(*sorted(points), strict=True)
        look = _look(name, max(seeds))
        ax.plot(x, y, marker=".", **look)
        ax.fill_between(x, lo, hi, color=look["color"], alpha=0.12, linewidth=0)
    here = next(p[1] for p in lines[DEFAULT] if p[0] == TRIALS)
    ax.axhline(here, color="black", linewidth=0.6)
    ax.text(240, here, f"kvei after {TRIALS} ", ha="right", va="bottom", fontsize=8)
    ax.set_xlabel("policies evaluated")
    ax.set_ylabel("true hypervolume of the reported set, surrogate\n(decades of bytes x of loss)")
    ax.set_title("Simulated on the surrogate: mean over seeds, 95 % interval", fontsize=10)
    _save(fig, "simulated.png")


def texts() -> None:
    """Per text, the volume at the end on the search text (hollow) and the report text (full)."""
    with (HERE / "texts.csv").open() as f:
        rows = [r for r in csv.DictReader(f) if r["mark"] == "end"]
    names = sorted({r["text"] for r in rows}, reverse=True)
    fig, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for up, contender in ((0.22, "kvei"), (0.0, "kvei_layers"), (-0.22, "tpe")):
        found = [r for r in rows if r["contender"] == contender]
        y = [names.index(r["text"]) + up for r in found]
        search, report = ([float(r[f"volume_{k}"]) for r in found] for k in ("search", "report"))
        colour = COLOURS[contender]
        ax.hlines(y, search, report, color=colour, linewidth=0.8)
        ax.plot(search, y, "o", markerfacecolor="white", color=colour)
        ax.plot(report, y, "o", color=colour, label=contender)
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel("hypervolume after 60 policies (decades of bytes x decades of loss)")
    ax.set_title("Full: report text. Hollow: the search text that chose the set", fontsize=10)
    _save(fig, "texts.png")


def _look(name: str, seeds: object) -> dict[str, Any]:
    sampler, kind = name.split("-", 1)
    label = f"{sampler}, {kind.replace('-', ', ')} ({seeds})"
    return {"color": COLOURS[sampler], "linestyle": STYLES[kind], "linewidth": 1.6, "label": label}


def _save(fig: Figure, name: str) -> None:
    (ax,) = fig.axes
    ax.legend(fontsize=8, frameon=False, ncols=1 if name == "texts.png" else 2)
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(HERE / name, dpi=130)


def main() -> None:
    live()
    cells()
    texts()
    lines = on_the_surrogate()
    simulated(lines)
    simulated_cells(lines)


if __name__ == "__main__":
    main()
