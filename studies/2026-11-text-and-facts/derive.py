"""Tables of text and facts from `records`, and the starting points that follow.

    python derive.py [--out FOLDER]

`search.csv` and `report.csv`: a row a size, model, text and policy: how much perplexity rises, in
per cent; facts that are answered exactly, and how many the full cache answers; and the share of
the context that is lost, half of it of the text and half of the facts. `means.csv`: the mean over
texts, best first. `points.csv`: the starting points, chosen on the search parts, five for 1/6 of
1536 tokens and then one more for 1/16 of 2048: each lowers the mean over texts of the best so far
most, or where none does, is itself best; of a rule and its bits there are two at most, since other
budgets and questions favour other ones, and a ladder only where the same policy without it was
measured and loses more. `against.csv`: how much more others lose on the report parts, text by text,
of text and of facts, with 95 % intervals over texts.
"""

import argparse
import csv
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
from candidates import candidates

from kvsearch.results.intervals import interval

HERE = Path(__file__).parent
FIRST = "1536-256"  # context and budget, of records that lie in no folder of that name
POINTS, ALIKE = {FIRST: 5, "2048-128": 1}, 2
Rows = list[dict[str, object]]


def records() -> dict[tuple[str, str, str, str, str], dict]:
    """(size, model, text, part, policy) -> record; the one with the most items."""
    found: dict[tuple[str, str, str, str, str], dict] = {}
    folder = HERE / "records"
    for file in [*sorted(folder.glob("*.jsonl")), *sorted(folder.glob("*/*.jsonl"))]:
        size = FIRST if file.parent == folder else file.parent.name
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[(size, file.stem, *row["key"])] = row
    return found


def lost(mine: dict, full: dict) -> tuple[float, float]:
    """Rise of the NLL of text and facts as shares of what the context is worth, on common items."""
    n = min(len(mine["text"]), len(full["text"]))
    gaps = (np.mean(mine[k][:n]) - np.mean(full[k][:n]) for k in ("text", "facts"))
    text, facts = (float(gap) / worth for gap, worth in zip(gaps, full["worth"], strict=True))
    return text, facts


def table(part: str) -> Rows:
    """A row a size, model, text and policy."""
    rows, every = Rows(), records()
    for (size, model, text, of, policy), mine in every.items():
        if of != part:
            continue
        full = every[size, model, text, part, "full"]
        context, budget = size.split("-")
        n = min(len(mine["text"]), len(full["text"]))
        dnll = float(np.mean(mine["text"][:n]) - np.mean(full["text"][:n]))
        shares = lost(mine, full)
        rows.append({
            "context": context, "budget": budget,
            "model": model, "text": text, "policy": policy, "items": n,
            "ppl_rise_percent": f"{100 * math.expm1(min(dnll, 20)):.2f}", "dnll": f"{dnll:.4f}",
            "exact": sum(mine["exact"][:n]), "full_exact": sum(full["exact"][:n]),
            "asks": sum(mine["asks"][:n]), "facts_lost": f"{shares[1]:.4f}",
            "context_lost": f"{sum(shares) / 2:.4f}",
        })  # fmt: skip
    return rows


def means(part: str) -> Rows:
    """The mean over the texts of a size and model, of policies measured on all of them."""
    by: dict[tuple[tuple[str, ...], str], Rows] = defaultdict(list)
    for row in table(part):
        of = tuple(str(row[k]) for k in ("context", "budget", "model"))
        by[of, str(row["policy"])].append(row)
    most = {m: max(len(x) for (n, _), x in by.items() if n == m) for m, _ in by}
    rows = [
        {
            "context": of[0], "budget": of[1], "model": of[2], "part": part,
            "policy": policy, "texts": len(own),
            "ppl_rise_percent": f"{np.mean([float(x['ppl_rise_percent']) for x in own]):.2f}",
            "exact": sum(int(x["exact"]) for x in own),
            "full_exact": sum(int(x["full_exact"]) for x in own),
            "asks": sum(int(x["asks"]) for x in own),
            "context_lost": f"{np.mean([float(x['context_lost']) for x in own]):.4f}",
        }
        for (of, policy), own in by.items()
        if len(own) == most[of]
    ]  # fmt: skip
    same = ("context", "budget", "model")
    return sorted(rows, key=lambda r: (*(r[k] for k in same), float(str(r["context_lost"]))))


def shape(name: str) -> tuple[object, object]:
    """Rule and bits of a candidate."""
    knobs = candidates()[name]
    return knobs["rule"], knobs["tiers"]


def points() -> Rows:
    """Greedy, size by size: each point lowers the mean over cells of the best so far most."""
    chosen: list[str] = []
    found = Rows()
    for size, many in POINTS.items():
        known = eligible(size)
        mine = 0
        while mine < many:
            before = [known[n] for n in chosen if n in known]
            best = np.min(before, 0) if before else np.inf
            of = [shape(n) for n in chosen]
            rest = {
                n: (float(np.minimum(best, x).mean()), float(x.mean()))
                for n, x in known.items()
                if n not in chosen and of.count(shape(n)) < ALIKE
            }
            if not rest:
                break
            name, mine = min(rest, key=lambda n: rest[n]), mine + 1
            chosen.append(name)
            lost, knobs = f"{known[name].mean():.4f}", json.dumps(candidates()[name])
            found.append({"name": name, "knobs": knobs, "context_lost": lost, "size": size})
    return found


def eligible(size: str) -> dict[str, np.ndarray]:
    """What candidates that may be chosen lose on the search part of each model and text."""
    cells: dict[str, dict[tuple[str, str], float]] = defaultdict(dict)
    for row in table("search"):
        if f"{row['context']}-{row['budget']}" == size:
            cell = str(row["model"]), str(row["text"])
            cells[str(row["policy"])][cell] = float(str(row["context_lost"]))
    every = sorted({c for x in cells.values() for c in x})
    known = {
        n: np.array([cells[n][c] for c in every])
        for n in candidates()
        if set(cells.get(n, ())) == set(every)
    }
    plain = {n: n.replace("ladder-half-overlap+", "") for n in known}
    loses_more = {n: known[p].mean() > known[n].mean() for n, p in plain.items() if p in known}
    return {n: x for n, x in known.items() if n == plain[n] or loses_more.get(n, False)}


def against(mine: str = "mean+k5v4+heads0.75") -> Rows:
    """What others lose more than one of the starting points, on the report parts of all texts."""
    lost: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in table("report"):
        both = float(str(row["dnll"])), float(str(row["facts_lost"]))
        lost[str(row["policy"])][str(row["text"])] = both
    found = Rows()
    for policy, theirs in lost.items():
        for i, of in enumerate(("text, nats", "facts, share of the context")):
            more = np.array([theirs[t][i] - x[i] for t, x in lost[mine].items()])
            if policy in (mine, "full"):
                continue
            mean = interval(more)
            found.append({
                "policy": policy, "against": mine, "of": of, "texts": more.size,
                "worse_on": int((more > 0).sum()), "mean": f"{mean.mean:.4f}",
                "lo": f"{mean.lo:.4f}", "hi": f"{mean.hi:.4f}",
            })  # fmt: skip
    return found


def tables() -> dict[str, Rows]:
    """Name -> rows."""
    found = {
        "search.csv": table("search"),
        "report.csv": table("report"),
        "means.csv": [*means("search"), *means("report")],
        "points.csv": points(),
        "against.csv": against(),
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
