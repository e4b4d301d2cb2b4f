"""From the records to the tables. `python derive.py --out FOLDER`.

`candidates.csv`: dNLL to the full cache of every candidate with head budgets by `kvsearch heads`.
`prompts.csv`: the same candidates on needles: share of the context lost, exact answers;
`prompts-report.csv`: some of them on other needles, which no point was learned on.
`points.csv`: what `kvsearch/policy_search/portfolio.yaml` ships. Each next point lowers the most
the mean, over tasks, of the best point's loss in units of what the better textbook combination
loses there; of points for prompts, the mean share of the context lost.
`text.csv`: portfolio points on four windows of the report part of six texts; `text-mean.csv`: their
means over all windows, with the paired difference to the first point of the portfolio before.
`gemma-mean.csv`: the same of Gemma-3-270M at 128 slots. `controls-mean.csv`: the first
point with budgets of other kinds and from other measurements, paired with `recall`, which ships.
`needles.csv`: facts in prose that no measurement of heads saw, asked after the context;
`gemma-needles.csv`: the same of Gemma-3-270M.
`before.csv`: the same policies on the same windows, with losses of heads estimated on 512 tokens of
the text, out of the records of `studies/2026-11-portfolio`. Nats per token, means of two windows.
"""

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from candidates import candidates

from kvsearch.results.intervals import paired, wilson

HERE = Path(__file__).parent
BEFORE = HERE.parent / "2026-11-portfolio" / "records"
TEXTBOOK = ("h2o+int4-fine", "xmu+int4")
FIRST = "before-1"  # the first point of the portfolio before
POINTS, GAIN = 3, 0.01  # of a portfolio at most; by how much one must lower the mean
SAME = {  # candidates that the portfolio before had, too
    "mean, 0.5": "mean",
    "b384, 0.25": "b384",
    "designed, h2o, 0.5": "designed, h2o",
    "designed, 0.5": "designed",
}


def losses(folder: Path) -> dict[str, dict[str, float]]:
    """Task -> policy -> loss over the full cache."""
    found = {}
    for file in sorted(folder.glob("*-b*.json")):
        rows = json.loads(file.read_text())
        full = np.array(rows["full"]["sums"]).sum(1)
        found[file.stem] = {
            name: float(((np.array(row["sums"]).sum(1) - full) / row["tokens"]).mean())
            for name, row in rows.items()
            if name != "full"
        }
    return found


def asked(folder: str = "prompts") -> dict[str, dict[str, tuple[float, float]]]:
    """Task -> candidate or method -> share of the context lost, share of exact answers."""
    found = {}
    for file in sorted((HERE / "records" / folder).glob("*-b*.json")):
        rows = json.loads(file.read_text())
        full, empty = (np.mean(rows[n]["nll"]) for n in ("full", "empty"))
        found[file.stem] = {
            n: (float((np.mean(row["nll"]) - full) / (empty - full)), float(np.mean(row["exact"])))
            for n, row in rows.items()
            if n != "empty"
        }
    return found


def rows_of(name: str) -> list[dict]:
    """Lines of a record of `measure.py`; none where it was not run."""
    file = HERE / "records" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def on_text(name: str) -> dict[tuple[str, int, str], list[float]]:
    """Text, slots and point -> dNLL to the full cache of every window."""
    rows = rows_of(name)
    full = {r["key"][0]: r["sums"] for r in rows if r["key"][2] == "full"}
    return {
        tuple(r["key"]): [
            (x - f) / r["tokens"][s]
            for x, f in zip(r["sums"][s], full[r["key"][0]][s], strict=True)
        ]
        for r in rows
        if r["key"][2] != "full" and (s := str(r["key"][1]))
    }


def means(
    found: dict[tuple[str, int, str], list[float]], to: str = FIRST
) -> list[dict[str, object]]:
    """Slots and point -> mean over all windows of all texts, and less than that of `to`."""
    texts = sorted({text for text, _, _ in found})
    out: list[dict[str, object]] = []
    for slots in sorted({s for _, s, _ in found}):
        for point in sorted({p for _, s, p in found if s == slots}):
            have = [t for t in texts if (t, slots, point) in found]
            mine = np.concatenate([found[t, slots, point] for t in have])
            row: dict[str, object] = {
                "slots": slots, "point": point, "texts": len(have), "windows": len(mine),
                "dnll": f"{mine.mean():.4f}",
            }  # fmt: skip
            if all((t, slots, to) in found for t in have):
                first = np.concatenate([found[t, slots, to] for t in have])
                gap = paired(mine[:, None], first[:, None])
                row["less"] = f"{-gap.mean:.4f}"
                row["lo"], row["hi"] = f"{-gap.hi:.4f}", f"{-gap.lo:.4f}"
                row["ratio"] = f"{mine.mean() / first.mean():.2f}"
            out.append(row)
    return out


def needles(name: str) -> list[dict[str, object]]:
    """A row per cell and policy."""
    out: list[dict[str, object]] = []
    for r in rows_of(name):
        tokens, part, facts, policy = r["key"]
        share = wilson(sum(r["exact"]), len(r["exact"]))
        out.append({
            "tokens": tokens, "part": f"1/{part}", "facts": facts, "policy": policy,
            "n": len(r["exact"]), "exact": f"{share.mean:.2f}", "lo": f"{share.lo:.2f}",
            "hi": f"{share.hi:.2f}", "nll": f"{np.mean(r['nll']):.3f}",
        })  # fmt: skip
    return out


def learned(
    tasks: dict[str, dict[str, float]], unit: dict[str, float], missing: float = float("inf")
) -> list[str]:
    """Names of the points, the most useful one first; losses in units of the task's.

    `missing` is the loss of what cannot be built at a budget.
    """
    points: list[str] = []
    before = float("inf")

    def mean(names: list[str]) -> float:
        best = [min(e.get(n, missing) for n in names) / unit[t] for t, e in tasks.items()]
        return float(np.mean(best))

    while len(points) < POINTS:
        means = {n: mean([*points, n]) for n in candidates() if n not in points}
        best = min(means, key=lambda n: means[n])
        if means[best] > before - GAIN:
            break
        points.append(best)
        before = means[best]
    return points


def tables() -> dict[str, list[dict[str, object]]]:
    """Tables by name."""
    now, before = losses(HERE / "records" / "candidates"), losses(BEFORE)
    textbook = {t: min(each[n] for n in TEXTBOOK if n in each) for t, each in now.items()}
    prompts, reported = asked(), asked("prompts-report")
    lost = {t: {n: x for n, (x, _) in each.items()} for t, each in prompts.items()}
    points = [(n, "") for n in learned(now, textbook)]
    points += [(n, "1") for n in learned(lost, dict.fromkeys(lost, 1.0), 1.0)]
    wide = on_text("text-smollm2-135m")
    tables: dict[str, list[dict[str, object]]] = {
        "text.csv": [
            {"text": t, "slots": s, "point": p, "dnll": f"{np.mean(x):.4f}",
             "windows": " ".join(f"{v:.4f}" for v in x)}
            for (t, s, p), x in wide.items()
        ],
        "text-mean.csv": means(wide),
        "gemma-mean.csv": means(on_text("text-gemma3-270m")),
        "controls-mean.csv": means(on_text("controls-smollm2-135m"), "recall"),
        "needles.csv": needles("needles-smollm2-135m"),
        "gemma-needles.csv": needles("needles-gemma3-270m"),
        "prompts-report.csv": [
            {"task": task, "policy": name, "context_lost": f"{x:.3f}", "exact": f"{e:.3f}"}
            for task, each in reported.items()
            for name, (x, e) in each.items()
        ],
        "prompts.csv": [
            {"task": task, "policy": name, "context_lost": f"{x:.3f}", "exact": f"{e:.3f}"}
            for task, each in prompts.items()
            for name, (x, e) in each.items()
        ],
        "candidates.csv": [
            {"task": task, "policy": name, "dnll": f"{x:.4f}"}
            for task, each in now.items()
            for name, x in each.items()
        ],
        "points.csv": [
            {"name": f"earlier-{i}", "candidate": n, "source": candidates()[n][0],
             "knobs": json.dumps(candidates()[n][1]), "prompts": asks}
            for i, (n, asks) in enumerate(points, 1)
        ],
        "before.csv": [
            {"task": task, "policy": name, "heads_on_text": f"{before[task][old]:.4f}",
             "heads_on_recall": f"{now[task][name]:.4f}"}
            for task in now
            for name, old in SAME.items()
            if task in before and name in now[task] and old in before[task]
        ],
    }  # fmt: skip
    return {name: rows for name, rows in tables.items() if rows}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    for name, rows in tables().items():
        with open(o.out / name, "w", newline="") as f:
            fields = dict.fromkeys(k for row in rows for k in row)
            writer = csv.DictWriter(f, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
