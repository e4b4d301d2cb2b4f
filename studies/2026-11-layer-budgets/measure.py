"""Slots per layer from measured sensitivity: how fine to measure, and how steep to follow it.

One policy of 256 fp16 slots, its slots shared out in different ways, on report text; sensitivity is
measured on search text. Rows go to results.csv, paired with the even spread.

    python studies/2026-11-layer-budgets/measure.py --text wikitext2-test.raw
"""

import csv
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from kvsearch.app.inputs import TextOptions, text
from kvsearch.app.progress import Shown
from kvsearch.evaluate.quality import Evaluator
from kvsearch.evaluate.sensitivity import kept_or_measured
from kvsearch.knobs import Setting, Value, build
from kvsearch.models.load import load_model
from kvsearch.policy import Policy
from kvsearch.stats import paired

BUDGET, CONTEXT, TOKENS = 256, 4096, 768
KNOBS: dict[str, Value] = dict(
    score="xmu", tiers="k4v4", rotate=True, interval=16, sinks=8, recents="half"
)


@click.command()
@click.option("--text", "file", required=True, help="FILE; search before byte 900000, report after")
def main(file: str) -> None:
    """Measure and write results.csv."""
    shown, loaded = Shown(quiet=True), load_model()
    options = TextOptions((f"{file}:0-900000",), None, (f"{file}:900000-",), CONTEXT, 1, 1)
    windows = text(loaded, options, shown.say).windows
    evaluator, shape = Evaluator(loaded), loaded.shape
    setting = Setting(shape, shape.budget_bytes(BUDGET), CONTEXT)

    def losses(policy: Policy):
        nll = evaluator.quality(policy, windows["report"], resident=False).nll
        return nll[:, BUDGET - 1 :].astype(np.float64)

    full, even = losses(Policy()), losses(build(KNOBS, setting))
    rows = [row("even", 0.0, full, even, even)]
    for groups in (10, shape.layers):
        found = kept_or_measured(evaluator, windows["search"][:1, :TOKENS], shown.step, groups)
        measured = replace(setting, sensitivity=found)
        for exponent in (0.125, 0.25, 0.35, 0.5):
            policy = build(KNOBS | {"spread": "sensitivity", "exponent": exponent}, measured)
            rows.append(row(f"{groups} groups", exponent, full, even, losses(policy)))
    with Path(__file__).with_name("results.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def row(spread: str, exponent: float, full, even, mine) -> dict[str, object]:
    """One tidy row, echoed."""
    d = paired(mine, even)
    numbers = {"dnll_full": (mine - full).mean(), "dnll_even": d.mean, "lo": d.lo, "hi": d.hi}
    found: dict[str, object] = {"spread": spread, "exponent": exponent, "n": mine.size}
    found |= {k: f"{v:.4f}" for k, v in numbers.items()}
    click.echo(found)
    return found


if __name__ == "__main__":
    main()
