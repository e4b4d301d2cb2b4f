"""Losses to the full cache, shares of an opponent's, ranks, and what ragged heads cost.

axes.csv, ratios.csv, heads.csv and cost.csv. Intervals are 95 %, Student's t: of losses over blocks
of 1024 tokens (eight recorded blocks), paired; of cost over pairs of evaluations.
"""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr, t

HERE = Path(__file__).parent
BLOCK, TOGETHER = 128, 8
OPPONENTS = ("found", "xmu+int4")
SIZES = (20, 36, 68, 132, 260, 516, 1028)  # of the estimates, see sensitivity.py


def blocks(row: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Sums and tokens of long blocks, all windows one after the other."""
    sums = np.array(row["sums"])
    sizes = np.full(sums.shape[1], BLOCK)
    sizes[-1] = row["tokens"] - BLOCK * (sums.shape[1] - 1)
    starts = np.arange(0, sums.shape[1], TOGETHER)
    total = np.add.reduceat(sums, starts, axis=1).ravel()
    return total, np.tile(np.add.reduceat(sizes, starts), len(sums))


def interval(sums: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    """Mean per token with its interval."""
    mean, n = sums.sum() / sizes.sum(), len(sums)
    error = np.sqrt(n / (n - 1) * ((sums - mean * sizes) ** 2).sum()) / sizes.sum()
    half = t.ppf(0.975, n - 1) * error
    return float(mean), float(mean - half), float(mean + half)


def records(part: str) -> dict[tuple[int, str], dict[str, Any]]:
    """Rows by budget and text."""
    found = {}
    for file in sorted(HERE.glob(f"records/{part}-*.json")):
        _, text, budget = file.stem.split("-")
        found[int(budget[1:]), text] = json.loads(file.read_text())
    return found


def axes() -> list[dict[str, object]]:
    """One row per part, budget, text and policy."""
    out: list[dict[str, object]] = []
    for part in ("tune", "report"):
        for (budget, text), kept in records(part).items():
            full, sizes = blocks(kept["full"])
            for name, row in kept.items():
                sums, _ = blocks(row)
                mean, lo, hi = interval(sums - full, sizes)
                line: dict[str, object] = {
                    "part": part, "slots": budget, "text": text, "policy": name,
                    "n": int(sizes.sum()), "ppl": f"{np.exp(sums.sum() / sizes.sum()):.3f}",
                    "dnll_full": f"{mean:+.4f}", "lo": f"{lo:+.4f}", "hi": f"{hi:+.4f}",
                }  # fmt: skip
                for other in OPPONENTS:
                    line |= dict.fromkeys((f"to_{other}", f"to_{other}_lo", f"to_{other}_hi"), "")
                    if other in kept and name not in ("full", other):
                        d = interval(sums - blocks(kept[other])[0], sizes)
                        names = (f"to_{other}", f"to_{other}_lo", f"to_{other}_hi")
                        line |= {k: f"{v:+.4f}" for k, v in zip(names, d, strict=True)}
                line |= {"bytes_peak": row["bytes_peak"], "seconds": row["seconds"]}
                out.append(line)
    return out


def ratios() -> list[dict[str, object]]:
    """Mean loss over the texts, and its share of an opponent's, for policies measured on all."""
    out: list[dict[str, object]] = []
    for part in ("tune", "report"):
        found = records(part)
        for budget in sorted({b for b, _ in found}):
            texts = [kept for (b, _), kept in found.items() if b == budget]
            names = [n for n in texts[0] if n != "full" and all(n in kept for kept in texts)]
            losses = {n: float(np.mean([_loss(kept, n) for kept in texts])) for n in names}
            for name, loss in sorted(losses.items(), key=lambda x: x[1]):
                line: dict[str, object] = {
                    "part": part, "slots": budget, "texts": len(texts), "policy": name,
                    "dnll_full": f"{loss:+.4f}",
                }  # fmt: skip
                for other in OPPONENTS:
                    share = f"{loss / losses[other]:.2f}" if other in losses else ""
                    line[f"share_of_{other}"] = share
                out.append(line)
    return out


def _loss(kept: dict[str, Any], name: str) -> float:
    sums, sizes = blocks(kept[name])
    return float((sums - blocks(kept["full"])[0]).sum() / sizes.sum())


def heads() -> list[dict[str, object]]:
    """How well estimated losses rank the heads that were measured, by window and size."""
    kept = json.loads((HERE / "heads.json").read_text())
    measured = kept["measured 0"]["losses"]
    out: list[dict[str, object]] = []
    for name, entry in kept.items():
        if name.startswith("priced slots"):
            for slots, column in zip(SIZES, np.array(entry["losses"]).T, strict=True):
                found = float(spearmanr(column, measured).statistic)
                out.append(
                    {"window": name.split()[-1], "slots": slots, "rank_correlation": f"{found:.3f}"}
                )
    return out


def cost() -> list[dict[str, object]]:
    """CPU seconds of heads that differ over those of even ones: geometric means over pairs."""
    out: list[dict[str, object]] = []
    for name, pairs in json.loads((HERE / "records" / "cost.json").read_text()).items():
        for kind in pairs[0]:
            if kind == "even":
                continue
            even, other = (np.array([pair[k] for pair in pairs]) for k in ("even", kind))
            logs = np.log(other / even)
            half = t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / len(logs) ** 0.5
            ratio, lo, hi = (f"{np.exp(logs.mean() + x):.2f}" for x in (0, -half, half))
            out.append(
                {
                    "policy": name, "heads": kind, "pairs": len(logs),
                    "even_s": f"{even.mean():.1f}", "s": f"{other.mean():.1f}",
                    "ratio": ratio, "lo": lo, "hi": hi,
                }
            )  # fmt: skip
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    tables = {"axes": axes(), "ratios": ratios(), "heads": heads(), "cost": cost()}
    for name, rows in tables.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        (out / f"{name}.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
