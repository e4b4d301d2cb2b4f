"""Draw `outcome.png` from `comparisons.csv`: loss over the full cache against the budget.

Open marks are of further searches at a budget, on other report text, from left to right.

python studies/2026-11-outcome/figure.py
"""

import csv
from collections import defaultdict
from math import log
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

HERE = Path(__file__).parent
COLOURS = {
    "best published method": "#777777", "best combination by hand": "#a37200",
    "h2o + 4 bits, tuned": "#004488", "recommended": "#bb3355",
}  # fmt: skip
NAMES = {"method": "best published method", "combined": "best combination by hand"}


def main() -> None:
    with (HERE / "comparisons.csv").open() as f:
        rows = list(csv.DictReader(f))
    texts = list(dict.fromkeys(r["text"] for r in rows))
    once = {r["budget"]: r["run"] for r in reversed(rows)}
    fig, axes = plt.subplots(1, len(texts), figsize=(9, 4), layout="constrained", sharey=True)
    for ax, text in zip(axes, texts, strict=True):
        lines: dict[str, dict[int, float]] = defaultdict(dict)
        mine = [r for r in rows if r["text"] == text and r["run"] == once[r["budget"]]]
        again = [r for r in rows if r["text"] == text and r["run"] != once[r["budget"]]]
        full = {
            int(r["budget"]): log(float(r["opponent_ppl"])) for r in mine if r["kind"] == "full"
        }
        for r in mine:
            budget, name = int(r["budget"]), NAMES.get(r["kind"], "h2o + 4 bits, tuned")
            if r["kind"] == "full":
                lines["recommended"][budget] = float(r["dnll"])
                at, error = (
                    [budget],
                    [[float(r["dnll"]) - float(r["lo"])], [float(r["hi"]) - float(r["dnll"])]],
                )
                ax.errorbar(at, [float(r["dnll"])], error, color=COLOURS["recommended"], capsize=2)
            else:
                loss = log(float(r["opponent_ppl"])) - full[budget]
                lines[name][budget] = min(loss, lines[name].get(budget, loss))
        for name, colour in COLOURS.items():
            points = sorted(lines[name].items())
            ax.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name)
        base = {r["run"]: log(float(r["opponent_ppl"])) for r in again if r["kind"] == "full"}
        turn = {run: i for i, run in enumerate(base, start=1)}
        for r in again:
            at = int(r["budget"]) + 6 * turn[r["run"]]
            if r["kind"] == "full":
                _open(ax, at, float(r["dnll"]), "recommended")
            elif r["kind"] == "tuned":
                loss = log(float(r["opponent_ppl"])) - base[r["run"]]
                _open(ax, at, loss, "h2o + 4 bits, tuned")
        least, most = min(int(r["n"]) for r in mine), max(int(r["n"]) for r in mine + again)
        n = f"{most}" if least == most else f"{least} to {most}"
        ax.set_title(f"{text}, n = {n} tokens", fontsize=10)
        ax.set_xticks(sorted(full))
        ax.set_xlabel("budget, fp16 slots a layer")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("dNLL to the full cache, nats per token")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, frameon=False, title="open: searched again, other report text")
    axes[0].get_legend().get_title().set_fontsize(8)
    fig.savefig(HERE / "outcome.png", dpi=130)


def _open(ax: Axes, at: int, loss: float, name: str) -> None:
    """A mark beside the line's; where two fall together the smaller one is in front."""
    size, above = (4, 4) if name == "recommended" else (8, 3)
    ax.plot(
        at, loss, linestyle="", marker="o", markersize=size, mfc="white", color=COLOURS[name],
        zorder=above,
    )  # fmt: skip


if __name__ == "__main__":
    main()
