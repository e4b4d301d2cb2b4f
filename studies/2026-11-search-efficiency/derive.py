"""From the records to the tables: hypervolume of the reported set, on report text, against tokens.

python derive.py --out FOLDER
"""

import argparse
import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import noise_table
import numpy as np
import pyarrow.parquet as pq
from exposure import exposure
from kept import RECORDS, kept_policies
from scipy.stats import t as student

from kvsearch.policy import ModelShape
from kvsearch.results.pareto import front
from kvsearch.results.pareto import log_hypervolume as volume

HERE = Path(__file__).parent
CONTEXT, WINDOWS = 1024, 2  # as in live.py
MARKS = (25_600, 51_200, 102_400)  # search tokens: an eighth, a quarter and half of the opponent's
EARLIER = "earlier-"  # runs of an earlier version: data about policies, not contenders
NOISY = "kvei-warm-grow8"  # what others are compared with on the surrogate with noise
OPPONENT = "nsga2-cold-full"  # KVTuner's settings: 2 generations of 50, all evaluated in full


class Blocks:
    """Losses per block of 64 scored tokens, by part and policy."""

    def __init__(self) -> None:
        table = pq.read_table(RECORDS / "blocks.parquet").to_pylist()
        self.sums = {(r["part"], r["fingerprint"]): np.asarray(r["sums"]) for r in table}
        self.about = json.loads((RECORDS / "about.json").read_text())
        size = len(self.sums["search", self.about["full"]]) * self.about["block"]
        self.tokens = float(size)

    def dnll(self, part: str, key: str) -> float:
        """Mean difference to the full cache in nats per token."""
        full = self.sums[part, self.about["full"]]
        return float((self.sums[part, key] - full).sum() / self.tokens)


def checkpoints(tokens: Sequence[int]) -> dict[int | str, int]:
    """Number of trials after each count of search tokens, and at the end.

    Args:
        tokens: of each trial, in the order in which they ended.
    """
    spent = np.cumsum(tokens)
    marks = {m: int((spent <= m).sum()) for m in MARKS if m < spent[-1]}
    return {**marks, "end": len(tokens)}


def live(blocks: Blocks) -> list[dict]:
    """One row per run and checkpoint."""
    budget, runs = blocks.about["budget_bytes"], defaultdict(list)
    for row in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if not row["run"].startswith(EARLIER):
            runs[row["run"]].append(row)
    rows = []
    for run, trials in sorted(runs.items()):
        name, seed = run.rsplit("-", 1)
        found = marks(trials, lambda t: blocks.dnll("report", t["fingerprint"]), budget)
        rows += [{"contender": name, "seed": int(seed), **row} for row in found]
    return rows


def marks(trials: list[dict], report: Callable[[dict], float], budget: float) -> list[dict]:
    """Of one run at every checkpoint: tokens, and hypervolume of the set that it would report.

    Args:
        trials: in the order in which they ended.
        report: a trial's loss on the report text.
        budget: bytes.
    """
    rows = []
    for mark, count in checkpoints([t["tokens"] for t in trials]).items():
        known = trials[:count]
        done = [t for t in known if t["state"] == "complete"]
        points = [(float(t["bytes_peak"]), t["dnll"]) for t in done]
        kept = [done[i] for i in front(points)]
        reported = [(float(t["bytes_peak"]), report(t)) for t in kept]
        best = min((d for b, d in reported if b <= budget), default=float("nan"))
        states = [t["state"] for t in known]
        rows.append(
            {
                "mark": mark,
                "evaluated": sum(s in ("complete", "pruned", "failed") for s in states),
                "stopped": states.count("pruned"),
                "tokens": sum(t["tokens"] for t in known),
                "volume_search": volume(points, budget),
                "volume_report": volume(reported, budget),
                "best_dnll_report": best,
            }
        )
    return rows


def texts(budget: float) -> list[dict]:
    """One row per text, contender and checkpoint (`texts.py`)."""
    rows = []
    for file in sorted((RECORDS / "texts").glob("*.jsonl")):
        text, name = file.stem.split("-")
        trials = [json.loads(line) for line in file.read_text().splitlines()]
        found = marks(trials, lambda t: t["report"], budget)
        rows += [{"text": text, "contender": name, **row} for row in found]
    return rows


def paired(rows: list[dict], one: str = "kvei") -> list[dict]:
    """Per mark and contender: mean hypervolume over the texts, and the lead of `one` over it."""
    table: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for r in rows:
        table[r["mark"], r["contender"]][r["text"]] = r
    out = []
    for (mark, name), found in sorted(table.items(), key=lambda kv: (str(kv[0][0]), kv[0][1])):
        both = [t for t in found if t in table[mark, one]]
        if not both:
            continue
        row: dict = {"mark": mark, "contender": name, "texts": len(both)}
        for part in ("search", "report"):
            v = np.array([found[t][f"volume_{part}"] for t in both])
            lead = np.array([table[mark, one][t][f"volume_{part}"] for t in both]) - v
            ends = {f"lead_{part}_{k}": x for k, x in interval(lead).items()}
            row |= {f"volume_{part}": float(v.mean()), f"lead_{part}": float(lead.mean()), **ends}
        out.append({**row, "ahead_report": int((lead > 0).sum())})
    return out


def interval(v: np.ndarray) -> dict[str, float | str]:
    """Ends of the 95 % interval of the mean over seeds (Student's t); empty for one seed."""
    if len(v) < 2:
        return {"lo": "", "hi": ""}
    half = float(student.ppf(0.975, len(v) - 1)) * float(v.std(ddof=1)) / len(v) ** 0.5
    return {"lo": float(v.mean()) - half, "hi": float(v.mean()) + half}


def summary(rows: list[dict]) -> list[dict]:
    """Per contender and checkpoint: mean over seeds with its interval, and the target."""
    groups = defaultdict(list)
    for r in rows:
        groups[r["contender"], r["mark"]].append(r)
    target = [r["volume_report"] for r in groups.get((OPPONENT, "end"), [])]
    cost = [r["tokens"] for r in groups.get((OPPONENT, "end"), [])]
    out = []
    for (name, mark), found in groups.items():
        v = np.array([r["volume_report"] for r in found])
        tokens = float(np.mean([r["tokens"] for r in found]))
        out.append(
            {
                "contender": name,
                "mark": mark,
                "seeds": len(found),
                "evaluated": float(np.mean([r["evaluated"] for r in found])),
                "tokens": round(tokens),
                "volume_report": float(v.mean()),
                **interval(v),
                "best_dnll_report": float(np.mean([r["best_dnll_report"] for r in found])),
                "at_least_nsga2": bool(target) and bool(v.mean() >= np.mean(target)),
                "share_of_its_tokens": tokens / float(np.mean(cost)) if cost else "",
            }
        )
    return out


def simulated(place: str) -> list[dict]:
    """Per contender and checkpoint of the runs on the surrogate: means over seeds."""
    groups = defaultdict(list)
    for file in sorted(RECORDS.glob(f"{place}/*.parquet")):
        for row in pq.read_table(file).to_pylist():
            groups[row["contender"], row["evaluated"]].append(row)
    out = []
    for (name, evaluated), found in sorted(groups.items()):
        v = np.array([r["volume"] for r in found])
        out.append(
            {
                "contender": name,
                "evaluated": evaluated,
                "seeds": len(found),
                "tokens": round(float(np.mean([r["tokens"] for r in found]))),
                "volume": float(v.mean()),
                **interval(v),
            }
        )
    return out


def noisy() -> list[dict]:
    """Runs on the surrogate with noise, at the end; leads on the same seeds over the first."""
    found: dict[str, dict[int, dict]] = defaultdict(dict)
    for file in sorted(RECORDS.glob("noisy/*.parquet")):
        for row in pq.read_table(file).to_pylist():
            best = found[row["contender"]].get(row["seed"])
            if best is None or row["evaluated"] > best["evaluated"]:
                found[row["contender"]][row["seed"]] = row
    out = []
    for name, rows in sorted(found.items()):
        base = found[NOISY]
        v = np.array([r["volume"] for r in rows.values()])
        lead = np.array([r["volume"] - base[s]["volume"] for s, r in rows.items() if s in base])
        out.append(
            {
                "contender": name,
                "seeds": len(rows),
                "tokens": round(float(np.mean([r["tokens"] for r in rows.values()]))),
                "volume": float(v.mean()),
                "volume_se": float(v.std(ddof=1) / len(v) ** 0.5),
                "lead": float(lead.mean()),
                "lead_se": float(lead.std(ddof=1) / len(lead) ** 0.5),
            }
        )
    return out


def side_by_side() -> list[dict]:
    """Runs with several evaluators, now and by earlier versions, against kvei with one now."""
    found: dict[tuple[str, str, int], dict[int, dict]] = {}
    for file in sorted(RECORDS.glob("side-by-side/*.parquet")):
        rows = pq.read_table(file).to_pylist()
        contender = rows[0]["contender"]
        name = contender.removesuffix("-evaluators")
        many = int(name.rpartition("-")[2]) if name != contender else 1
        version = file.stem.partition(contender)[0].rstrip("-") or "now"
        found[version, contender.partition("-")[0], many] = {r["seed"]: r for r in rows}
    one = found["now", "kvei", 1]
    out = []
    for (version, sampler, many), rows in sorted(found.items()):
        v = np.array([r["volume"] for r in rows.values()])
        alike = sampler == "kvei"
        lead = v - np.array([one[seed]["volume"] for seed in rows])
        out.append(
            {
                "version": version,
                "sampler": sampler,
                "evaluators": many,
                "policies": rows[min(rows)]["evaluated"],
                "seeds": len(rows),
                "tokens": round(fmean(r["tokens"] for r in rows.values())),
                "time": round(fmean(r["time"] for r in rows.values())),
                "busy": fmean(r["busy"] for r in rows.values()),
                "volume": float(v.mean()),
                "volume_se": float(v.std(ddof=1) / len(v) ** 0.5) if len(v) > 1 else "",
                "share_of_one": float(v.mean() / np.mean([r["volume"] for r in one.values()]))
                if alike
                else "",
                "lead_se": float(lead.std(ddof=1) / len(lead) ** 0.5) if alike else "",
            }
        )
    return out


def prefix(blocks: Blocks) -> list[dict]:
    """Largest saving from computing the part before the first eviction once for all policies."""
    shape = ModelShape(**blocks.about["shape"])
    policies = kept_policies()
    groups = defaultdict(list)
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        policy = policies.get(t["fingerprint"])
        if t["tokens"] and policy is not None:
            alike = 0.0 if policy.quantizes else exposure(policy, shape).first
            windows = WINDOWS * min(alike, CONTEXT)
            groups[t["run"].rsplit("-", 1)[0]].append((min(windows, t["tokens"]), t["tokens"]))
    return [
        {
            "contender": name,
            "trials": len(found),
            "with_a_shared_part": sum(s > 0 for s, _ in found),
            "share_of_tokens": sum(s for s, _ in found) / sum(t for _, t in found),
        }
        for name, found in sorted(groups.items())
    ]


def repeats() -> list[dict]:
    """Differences of the loss of a policy on the search text when it is measured again.

    Runs of one session share their store; another session is on another machine of the same kind.
    A sum in another order moves values between two codes, so quantised policies differ more.
    """
    policies = kept_policies()
    found: dict[str, list[float]] = defaultdict(list)
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if t["state"] == "complete" and not t["run"].startswith(EARLIER):
            found[t["fingerprint"]].append(t["dnll"])
    apart = {k: v[-1] - v[0] for k, v in found.items() if v[-1] != v[0]}
    rows = []
    for bits in ("16", "fewer"):
        d = [x for k, x in apart.items() if policies[k].quantizes == (bits == "fewer")]
        if d:
            rms = float(np.sqrt(np.mean(np.square(d))))
            most = float(np.abs(d).max())
            rows.append({"bits": bits, "policies": len(d), "rms_nats": rms, "most_nats": most})
    return rows


def write(rows: list[dict], file: Path) -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({k: f"{v:.5f}" if isinstance(v, float) else v for k, v in row.items()})
    file.write_text(text.getvalue(), newline="\n")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    blocks = Blocks()
    rows = live(blocks)
    write(rows, out / "live.csv")
    write(summary(rows), out / "live-summary.csv")
    write(prefix(blocks), out / "prefix.csv")
    if rows := repeats():
        write(rows, out / "repeats.csv")
    if rows := texts(blocks.about["budget_bytes"]):
        write(rows, out / "texts.csv")
        write(paired(rows), out / "texts-summary.csv")
    if found := simulated("simulated"):
        write(found, out / "simulated.csv")
    if found := noisy():
        write(found, out / "noisy.csv")
    if found := side_by_side():
        write(found, out / "many-evaluators.csv")
    write(noise_table.table(), out / "noise.csv")


if __name__ == "__main__":
    main()
