"""What policies lose on several models, and what carries over from one to another.

    python derive.py [--out FOLDER]

`report.csv`: a row a model and policy, on the report parts of the texts that it has: how much
perplexity rises, facts answered exactly of those that the full cache answers, and the share of the
context lost, half of it of the text and half of the facts. `transfer.csv`: the policy that loses
least on the search parts of one model, on the report parts of another, with heads measured there:
how much more context it loses than that model's own choice, with a 95 % interval over documents.
`worst.csv`: what starting points of a search lose on each model's text at most, nats a token.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsearch.results.student_t import quantile

HERE = Path(__file__).parent
POINTS = ("mean+k5v4+heads0.5", "mean+k5v4+heads0.75", "h2o+k5v4+heads0.75+recent64",
          "h2o+k5v4+heads1+recent64", "h2o+k4v3+heads0.75")  # fmt: skip
Rows = list[dict[str, object]]
Records = dict[tuple[str, str, str], dict]  # (part, policy, text)


def records() -> dict[str, Records]:
    """What was measured on each model."""
    found: dict[str, Records] = {}
    for file in sorted((HERE / "records").glob("*.jsonl")):
        lines = map(json.loads, file.read_text().splitlines())
        found[file.stem] = {(x["key"][1], x["key"][2], x["key"][0]): x for x in lines}
    return found


def lost(of: Records, part: str, policy: str) -> dict[str, tuple[float, float, float]]:
    """By text: dNLL of the text in nats; context lost, of the text and of the facts."""
    found = {}
    for (where, name, text), mine in of.items():
        if (where, name) == (part, policy):
            full = of[part, "full", text]
            gaps = [float(np.mean(mine[k]) - np.mean(full[k])) for k in ("text", "facts")]
            found[text] = (gaps[0], gaps[0] / full["worth"][0], gaps[1] / full["worth"][1])
    return found


def context(of: Records, part: str, policy: str) -> dict[str, float]:
    """By text: share of the context that is lost."""
    return {text: (x[1] + x[2]) / 2 for text, x in lost(of, part, policy).items()}


def mean(shares: NDArray[np.float64]) -> tuple[float, float]:
    """Mean over documents, and half the width of its 95 % interval."""
    if len(shares) < 2:
        return float(shares.mean()), math.nan
    half = quantile(0.975, len(shares) - 1) * shares.std(ddof=1) / math.sqrt(len(shares))
    return float(shares.mean()), float(half)


def report() -> Rows:
    """A row a model and policy, least context lost first; of policies with equally many texts."""
    rows = Rows()
    for model, of in records().items():
        own = Rows()
        for policy in dict.fromkeys(name for part, name, _ in of if part == "report"):
            found = lost(of, "report", policy)
            texts = sorted(found)
            full = [of["report", "full", t] for t in texts]
            mine = [of["report", policy, t] for t in texts]
            total, half = mean(np.array([(found[t][1] + found[t][2]) / 2 for t in texts]))
            dnll = float(np.mean([found[t][0] for t in texts]))
            own.append({
                "model": model, "policy": policy, "texts": len(texts), "dnll": f"{dnll:.4f}",
                "ppl_rise_percent": f"{100 * math.expm1(min(dnll, 20)):.2f}",
                "exact": sum(sum(x["exact"]) for x in mine),
                "full_exact": sum(sum(x["exact"]) for x in full),
                "asks": sum(sum(x["asks"]) for x in mine),
                "context_lost": f"{total:.4f}", "half": "" if math.isnan(half) else f"{half:.4f}",
            })  # fmt: skip
        rows += sorted(own, key=lambda r: (-int(str(r["texts"])), float(str(r["context_lost"]))))
    return rows


def choice(of: Records) -> str | None:
    """The policy that loses least on the search parts, of those that have all texts of them."""
    names = dict.fromkeys(name for part, name, _ in of if part == "search" and name != "full")
    found = {n: context(of, "search", n) for n in names}
    most = max(map(len, found.values()), default=0)
    means = {n: float(np.mean([*x.values()])) for n, x in found.items() if len(x) == most}
    return min(means, key=lambda n: means[n], default=None)


def transfer() -> Rows:
    """The choice of one model on another."""
    every, rows = records(), Rows()
    chosen = {m: c for m, of in every.items() if (c := choice(of)) is not None}
    for source, policy in chosen.items():
        for target, of in every.items():
            own = chosen.get(target)
            there = context(of, "report", policy)
            its = context(of, "report", own) if own is not None else {}
            both = sorted(there.keys() & its.keys())
            if not both:
                continue
            regret, half = mean(np.array([there[t] - its[t] for t in both]))
            rows.append({
                "chosen_on": source, "policy": policy, "run_on": target, "own_choice": own,
                "regret": f"{regret:.4f}", "half": "" if math.isnan(half) else f"{half:.4f}",
                "documents": len(both),
                "context_lost": f"{np.mean([*there.values()]):.4f}",
            })  # fmt: skip
    return rows


def worst() -> Rows:
    """What the starting points of November 2026 lose on the text of each model at most."""
    rows = Rows()
    for model, of in records().items():
        by: dict[str, float] = defaultdict(float)
        for name in POINTS:
            for part in ("search", "report"):
                gaps = [x[0] for x in lost(of, part, name).values()]
                by[name] = max([by[name], *gaps])
        rows += [{"model": model, "policy": n, "most_dnll": f"{x:.4f}"} for n, x in by.items()]
    return rows


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    found = {"report.csv": report(), "transfer.csv": transfer(), "worst.csv": worst()}
    for name, rows in found.items():
        with open(o.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
