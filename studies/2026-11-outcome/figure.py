"""Draw `outcome.png` from `comparisons.csv`: loss over the full cache against the budget.

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
NOW, BEFORE = "recommended", "recommended, before the portfolio"
COLOURS = {
    "best published method": "#777777", "best combination by hand": "#a37200",
    "h2o + 4 bits, tuned": "#004488", BEFORE: "#dd99aa", NOW: "#bb3355",
}  # fmt: skip
NAMES = {
    "method": "best published method", "combined": "best combination by hand",
    "tuned": "h2o + 4 bits, tuned",
}  # fmt: skip


def main() -> None:
    with (HERE / "comparisons.csv").open() as f:
        rows = list(csv.DictReader(f))
    texts = list(dict.fromkeys(r["text"] for r in rows))
    fig, axes = plt.subplots(1, len(texts), figsize=(9, 4), layout="constrained", sharey=True)
    for ax, text in zip(axes, texts, strict=True):
        draw(ax, [r for r in rows if r["text"] == text], text)
    axes[0].set_ylabel("dNLL to the full cache, nats per token")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, frameon=False)
    fig.savefig(HERE / "outcome.png", dpi=130)


def draw(ax: Axes, rows: list[dict[str, str]], text: str) -> None:
    """One text: a line for each kind of policy, bars where an interval is known."""
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    now = [r for r in rows if r["run"].endswith("-portfolio")]
    before = [r for r in rows if r["run"] == f"b{r['budget']}" and r["kind"] == "full"]
    for r in before:
        lines[BEFORE][int(r["budget"])] = float(r["dnll"])
    full = {int(r["budget"]): log(float(r["opponent_ppl"])) for r in now if r["kind"] == "full"}
    for r in now:
        budget, loss = int(r["budget"]), float(r["dnll"])
        if r["kind"] == "full":
            lines[NOW][budget] = loss
            error = [[loss - float(r["lo"])], [float(r["hi"]) - loss]]
            ax.errorbar([budget], [loss], error, color=COLOURS[NOW], capsize=2)
        elif r["kind"] in NAMES:
            name, loss = NAMES[r["kind"]], log(float(r["opponent_ppl"])) - full[budget]
            lines[name][budget] = min(loss, lines[name].get(budget, loss))
    for name, colour in COLOURS.items():
        points = sorted(lines[name].items())
        ax.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name)
    least, most = (f(int(r["n"]) for r in now) for f in (min, max))
    ax.set_title(f"{text}, n = {least} to {most} tokens", fontsize=10)
    ax.set_xticks(sorted(full))
    ax.set_xlabel("budget, fp16 slots a layer")
    ax.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
