"""Tables of text and facts from `records`, and the starting points that follow.

    python derive.py [--out FOLDER]

`search.csv` and `report.csv`: a row a model, text and policy: how much perplexity rises, in per
cent; facts that are answered exactly, of those that the full cache answers; and the share of the
context that is lost, half of it of the text and half of the facts. `means.csv`: the mean over
texts, best first. `points.csv`: the starting points, chosen on the search parts: each lowers the
mean over texts of the best so far most, or where none does, is itself best; of a rule and its bits
there are two at most, since other budgets and questions favour other ones.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from candidates import candidates

HERE = Path(__file__).parent
POINTS, ALIKE = 5, 2
Rows = list[dict[str, object]]


def records() -> dict[tuple[str, str, str, str], dict]:
    """(model, text, part, policy) -> record; the one with the most items."""
    found: dict[tuple[str, str, str, str], dict] = {}
    for file in sorted((HERE / "records").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[(file.stem, *row["key"])] = row
    return found


def lost(mine: dict, full: dict) -> tuple[float, float]:
    """Rise of the NLL of text and facts as shares of what the context is worth, on common items."""
    n = min(len(mine["text"]), len(full["text"]))
    gaps = (np.mean(mine[k][:n]) - np.mean(full[k][:n]) for k in ("text", "facts"))
    text, facts = (float(gap) / worth for gap, worth in zip(gaps, full["worth"], strict=True))
    return text, facts


def table(part: str) -> Rows:
    """A row a model, text and policy."""
    rows, every = Rows(), records()
    for (model, text, of, policy), mine in every.items():
        if of != part:
            continue
        full = every[model, text, part, "full"]
        n = min(len(mine["text"]), len(full["text"]))
        dnll = float(np.mean(mine["text"][:n]) - np.mean(full["text"][:n]))
        shares = lost(mine, full)
        rows.append({
            "model": model, "text": text, "policy": policy, "items": n,
            "ppl_rise_percent": f"{100 * math.expm1(min(dnll, 20)):.2f}", "dnll": f"{dnll:.4f}",
            "exact": sum(mine["exact"][:n]), "full_exact": sum(full["exact"][:n]),
            "asks": sum(mine["asks"][:n]), "facts_lost": f"{shares[1]:.4f}",
            "context_lost": f"{sum(shares) / 2:.4f}",
        })  # fmt: skip
    return rows


def means(part: str) -> Rows:
    """The mean over the texts of a model, of policies that were measured on all of them."""
    by: dict[tuple[str, str], Rows] = defaultdict(list)
    for row in table(part):
        by[str(row["model"]), str(row["policy"])].append(row)
    most = {m: max(len(x) for (n, _), x in by.items() if n == m) for m, _ in by}
    rows = [
        {
            "model": model, "part": part, "policy": policy, "texts": len(own),
            "ppl_rise_percent": f"{np.mean([float(x['ppl_rise_percent']) for x in own]):.2f}",
            "exact": sum(int(x["exact"]) for x in own),
            "full_exact": sum(int(x["full_exact"]) for x in own),
            "asks": sum(int(x["asks"]) for x in own),
            "context_lost": f"{np.mean([float(x['context_lost']) for x in own]):.4f}",
        }
        for (model, policy), own in by.items()
        if len(own) == most[model]
    ]  # fmt: skip
    return sorted(rows, key=lambda r: (r["model"], float(str(r["context_lost"]))))


def shape(name: str) -> tuple[str, ...]:
    """Rule and bits of a candidate."""
    return tuple(name.split("+")[:2])


def points() -> Rows:
    """Greedy: each point lowers the mean over cells of the best so far most."""
    cells: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for row in table("search"):
        cells[str(row["policy"])][str(row["model"]), str(row["text"])] = float(
            str(row["context_lost"])
        )
    all_cells = sorted({c for x in cells.values() for c in x})
    known = {
        n: np.array([cells[n][c] for c in all_cells])
        for n in candidates()
        if set(cells.get(n, ())) == set(all_cells)
    }
    chosen: list[str] = []
    while known and len(chosen) < POINTS:
        best = np.min([known[n] for n in chosen], 0) if chosen else np.full(len(all_cells), np.inf)
        of = [shape(n) for n in chosen]
        rest = {
            n: (float(np.minimum(best, x).mean()), float(x.mean()))
            for n, x in known.items()
            if n not in chosen and of.count(shape(n)) < ALIKE
        }
        if not rest:
            break
        chosen.append(min(rest, key=lambda n: rest[n]))
    return [
        {"name": n, "knobs": json.dumps(candidates()[n]), "context_lost": f"{known[n].mean():.4f}"}
        for n in chosen
    ]


def tables() -> dict[str, Rows]:
    """Name -> rows."""
    found = {
        "search.csv": table("search"),
        "report.csv": table("report"),
        "means.csv": [*means("search"), *means("report")],
        "points.csv": points(),
    }
    return {name: rows for name, rows in found.items() if rows}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    for name, rows in tables().items():
        with open(o.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
