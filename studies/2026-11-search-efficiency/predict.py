"""Errors of kvei's model, fitted to the first policies of one run, on other policies.

On the benchmark's records: those of all other runs. On the journals of `studies/2026-11-outcome`:
the later ones of the same run.

    python studies/2026-11-search-efficiency/predict.py

Writes predict.csv: means over runs of the root mean squared error and the spread (decades of loss),
the correlation, and squared errors over the predicted variance.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from kept import RECORDS, kept_policies, surrogate_runs

from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_search.samplers.gp import fit
from kvsearch.policy_space import Setting
from kvsearch.policy_space import load as load_space
from kvsearch.policy_space.features import features, names_for
from kvsearch.results.pareto import log_loss

NAMES = names_for(load_space(str(Path(__file__).with_name("space.yaml"))))
HERE = Path(__file__).parent
OUTCOME = HERE.parent / "2026-11-outcome"
FITTED = (20, 30, 45)
Run = dict[str, float]  # fingerprint -> decades of loss, in the order of evaluation


def main() -> None:
    setting, policies, runs = benchmark()
    every = {k: v for run in runs for k, v in run.items()}
    x = {k: features(policies[k], setting, NAMES) for k in every}
    rows = []
    for n in FITTED:
        enough = [list(run) for run in runs if len(run) >= n]
        found = [judged(ks[:n], set(every) - set(ks[:n]), every, x) for ks in enough]
        rows.append(row("benchmark", n, found))
    later = dict[int, list[tuple[float, ...]]]()
    for place in sorted(OUTCOME.glob("b[0-9][0-9][0-9]")):
        setting_, policies_, run = journal(place)
        x_ = {k: features(policies_[k], setting_, NAMES) for k in run}
        for n in FITTED:
            known, rest = list(run)[:n], set(list(run)[n:])
            later.setdefault(n, []).append(judged(known, rest, run, x_))
    rows += [row("outcome", n, found) for n, found in later.items()]
    with (HERE / "predict.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def benchmark() -> tuple[Setting, dict[str, Policy], list[Run]]:
    """The live runs of `records/surrogate.json` that measured something to the end."""
    about = json.loads((RECORDS / "about.json").read_text())
    setting = Setting(ModelShape(**about["shape"]), about["budget_bytes"], 1024)
    runs: dict[str, Run] = {}
    mine = surrogate_runs()
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if t["state"] == "complete" and t["kind"] != "full" and t["run"] in mine:
            runs.setdefault(t["run"], {})[t["fingerprint"]] = log_loss(t["dnll"])
    return setting, kept_policies(), list(runs.values())


def journal(place: Path) -> tuple[Setting, dict[str, Policy], Run]:
    """One of the first four searches of the outcome study."""
    asked = json.loads((place / "study.json").read_text())
    settings = asked["settings"]
    setting = Setting(
        ModelShape(**asked["model"]["shape"]),
        settings["budget_bytes"],
        settings["context"],
    )
    done = [json.loads(line) for line in (place / "trials.jsonl").read_text().splitlines()]
    done = [t for t in done if t["state"] == "complete" and t["number"] >= 0]
    policies = {t["fingerprint"]: Policy.build(t["policy"]) for t in done}
    return setting, policies, {t["fingerprint"]: log_loss(t["dnll"]) for t in done}


def judged(known: list[str], others: set[str], y: Run, x: dict) -> tuple[float, ...]:
    """Error, spread, correlation and calibration on `others` of a model fitted to `known`."""
    gp = fit(np.array([x[k] for k in known]), np.array([y[k] for k in known]), np.zeros(len(known)))
    rest = [k for k in y if k in others]
    mean, std = gp.posterior(np.array([x[k] for k in rest]))
    truth = np.array([y[k] for k in rest])
    error = mean - truth
    claimed = float(np.mean((error / std) ** 2))
    r = float(np.corrcoef(mean, truth)[0, 1])
    return float(np.sqrt((error**2).mean())), float(truth.std()), r, claimed


def row(source: str, fitted: int, found: list[tuple[float, ...]]) -> dict:
    """A line of the table."""
    names = ("error", "spread", "correlation", "squared_over_claimed")
    means = dict(zip(names, np.mean(found, axis=0).round(3).tolist(), strict=True))
    out = {"source": source, "fitted": fitted, "runs": len(found), **means}
    print(out, flush=True)
    return out


if __name__ == "__main__":
    main()
