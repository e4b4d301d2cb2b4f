"""How well does kvei's model, fitted to the first policies of one run, predict others?

On the benchmark's records: those of all other runs. On the journals of `studies/2026-11-outcome`:
the later ones of the same run. For several powers with which a layer's loss is taken to fall with
its slots (`starvation.py`); at 0 the model knows nothing of that.

    python studies/2026-11-search-efficiency/predict.py

Writes predict.csv: means over runs of the root mean squared error and the spread (decades of loss),
the correlation, and squared errors over what the model claims.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from derive import surrogate_runs
from starvation import starvation

from kvsearch.knobs import Setting
from kvsearch.policy import ModelShape, Policy
from kvsearch.search.samplers.features import features
from kvsearch.search.samplers.gp import fit
from kvsearch.search.volume import log_loss

HERE = Path(__file__).parent
RECORDS, OUTCOME = HERE / "records", HERE.parent / "2026-11-outcome"
FITTED, FALLS = (20, 30, 45), (0.0, 1.0, 1.5, 2.0)
Run = dict[str, float]  # fingerprint -> decades of loss, in the order of evaluation


def main() -> None:
    setting, policies, runs = benchmark()
    every = {k: v for run in runs for k, v in run.items()}
    x = {k: features(policies[k], setting) for k in every}
    rows = []
    for fall in FALLS:
        expected = {k: starvation(policies[k], setting, fall) for k in every}
        for n in FITTED:
            enough = [list(run) for run in runs if len(run) >= n]
            found = [judged(ks[:n], set(every) - set(ks[:n]), every, x, expected) for ks in enough]
            rows.append(row("benchmark", fall, n, found))
        later = dict[int, list[tuple[float, ...]]]()
        for place in sorted(OUTCOME.glob("b[0-9][0-9][0-9]")):
            setting_, policies_, run = journal(place)
            x_ = {k: features(policies_[k], setting_) for k in run}
            expected_ = {k: starvation(policies_[k], setting_, fall) for k in run}
            for n in FITTED:
                known, rest = list(run)[:n], set(list(run)[n:])
                later.setdefault(n, []).append(judged(known, rest, run, x_, expected_))
        rows += [row("outcome", fall, n, found) for n, found in later.items()]
    with (HERE / "predict.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def benchmark() -> tuple[Setting, dict[str, Policy], list[Run]]:
    """All live runs, but those made since 1.5 was chosen, that measured something to the end."""
    about = json.loads((RECORDS / "about.json").read_text())
    setting = Setting(
        ModelShape(**about["shape"]), about["budget_bytes"], 1024, tuple(about["sensitivity"])
    )
    lines = (RECORDS / "policies.jsonl").read_text().splitlines()
    policies = {d["key"]: Policy.build(d["policy"]) for d in map(json.loads, lines)}
    runs: dict[str, Run] = {}
    mine = surrogate_runs()
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if t["state"] == "complete" and t["kind"] != "full" and t["run"] in mine:
            runs.setdefault(t["run"], {})[t["fingerprint"]] = log_loss(t["dnll"])
    return setting, policies, list(runs.values())


def journal(place: Path) -> tuple[Setting, dict[str, Policy], Run]:
    """One search of the outcome study, all from before the model knew of starvation."""
    asked = json.loads((place / "study.json").read_text())
    sensitivity = json.loads((place / "sensitivity.json").read_text())["per_layer"]
    settings = asked["settings"]
    setting = Setting(
        ModelShape(**asked["model"]["shape"]),
        settings["budget_bytes"],
        settings["context"],
        tuple(sensitivity),
    )
    done = [json.loads(line) for line in (place / "trials.jsonl").read_text().splitlines()]
    done = [t for t in done if t["state"] == "complete" and t["number"] >= 0]
    policies = {t["fingerprint"]: Policy.build(t["policy"]) for t in done}
    return setting, policies, {t["fingerprint"]: log_loss(t["dnll"]) for t in done}


def judged(
    known: list[str], others: set[str], y: Run, x: dict, expected: dict
) -> tuple[float, ...]:
    """Error, spread, correlation and calibration on `others` of a model fitted to `known`."""
    left = np.array([y[k] - expected[k] for k in known])
    gp = fit(np.array([x[k] for k in known]), left, np.zeros(len(left)))
    rest = [k for k in y if k in others]
    mean, std = gp.posterior(np.array([x[k] for k in rest]))
    guess, truth = mean + [expected[k] for k in rest], np.array([y[k] for k in rest])
    error = guess - truth
    claimed = float(np.mean((error / std) ** 2))
    r = float(np.corrcoef(guess, truth)[0, 1])
    return float(np.sqrt((error**2).mean())), float(truth.std()), r, claimed


def row(source: str, fall: float, fitted: int, found: list[tuple[float, ...]]) -> dict:
    """A line of the table."""
    names = ("error", "spread", "correlation", "squared_over_claimed")
    means = dict(zip(names, np.mean(found, axis=0).round(3).tolist(), strict=True))
    out = {"source": source, "fall": fall, "fitted": fitted, "runs": len(found), **means}
    print(out, flush=True)
    return out


if __name__ == "__main__":
    main()
