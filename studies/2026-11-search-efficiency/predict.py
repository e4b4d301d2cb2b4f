"""How well does kvei's model, fitted to the first policies of one run, predict those of all others?

    python studies/2026-11-search-efficiency/predict.py

Writes predict.csv: per number of policies, means over runs of the root mean squared error and the
spread (decades of loss), the correlation, and squared errors over what the model claims.
"""

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from kvsearch.knobs import Setting
from kvsearch.policy import ModelShape, Policy
from kvsearch.search.samplers.features import features
from kvsearch.search.samplers.gp import fit
from kvsearch.search.volume import log_loss

HERE = Path(__file__).parent
RECORDS, CONTEXT, FITTED = HERE / "records", 1024, (20, 30, 45)


def main() -> None:
    about = json.loads((RECORDS / "about.json").read_text())
    setting = Setting(
        ModelShape(**about["shape"]), about["budget_bytes"], CONTEXT, tuple(about["sensitivity"])
    )
    lines = (RECORDS / "policies.jsonl").read_text().splitlines()
    policies = {d["key"]: Policy.build(d["policy"]) for d in map(json.loads, lines)}
    runs: dict[str, dict[str, float]] = {}
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if t["state"] == "complete" and t["kind"] != "full":
            runs.setdefault(t["run"], {})[t["fingerprint"]] = log_loss(t["dnll"])
    every = {k: v for run in runs.values() for k, v in run.items()}
    x = {k: features(policies[k], setting) for k in every}
    rows = []
    for n in FITTED:
        found = [
            judged(dict(list(run.items())[:n]), every, x) for run in runs.values() if len(run) >= n
        ]
        means = np.mean(found, axis=0)
        names = ("error", "spread", "correlation", "squared_over_claimed")
        rows.append(
            {"fitted": n, "runs": len(found), **dict(zip(names, means.round(3), strict=True))}
        )
        print(rows[-1])
    with (HERE / "predict.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def judged(known: dict[str, float], every: dict[str, float], x: dict) -> tuple[float, ...]:
    """Error, spread, correlation and calibration on the policies that are not `known`."""
    y = torch.tensor(list(known.values()), dtype=torch.float64)
    gp = fit(torch.tensor([x[k] for k in known], dtype=torch.float64), y, torch.zeros_like(y))
    others = [k for k in every if k not in known]
    with torch.no_grad():
        mean, std = gp.posterior(torch.tensor([x[k] for k in others], dtype=torch.float64))
    truth = np.array([every[k] for k in others])
    error = mean.numpy() - truth
    claimed = float(np.mean((error / std.numpy()) ** 2))
    r = float(np.corrcoef(mean.numpy(), truth)[0, 1])
    return float(np.sqrt((error**2).mean())), float(truth.std()), r, claimed


if __name__ == "__main__":
    main()
