"""Layer budgets from layer sensitivity: measures of it, sizes of groups, exponents.

One policy of 256 fp16 slots with different layer budgets, on report text; layer sensitivity is
measured on search text. Rows go to results.csv, paired with uniform budgets.

    python studies/2026-11-layer-budgets/measure.py --text wikitext2-test.raw
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from kvsearch.evaluation import sensitivity
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, Value, build
from kvsearch.results.intervals import paired
from kvsearch.session.make_windows import TextOptions, text
from kvsearch.session.progress import Shown

BUDGET, CONTEXT, WINDOWS = 256, 4096, 2
KNOBS: dict[str, Value] = dict(
    rule="xmu", tiers="k4v4", rotate=True, interval=16, sinks=8, recent_window="half"
)
EXPONENTS = (0.25, 0.35, 0.5)
LEAST = 0.1  # smallest rise in NLL, in units of the mean, since many are below zero


@click.command()
@click.option("--text", "file", required=True, help="FILE; search before byte 900000, report after")
def main(file: str) -> None:
    """Measure and write results.csv."""
    shown, loaded = Shown(quiet=True), load_model()
    options = TextOptions((f"{file}:0-900000",), None, (f"{file}:900000-",), CONTEXT, 1, WINDOWS)
    windows = text(loaded, options, shown.say).windows
    evaluator, shape = Evaluator(loaded), loaded.shape
    setting = Setting(shape, shape.budget_bytes(BUDGET), CONTEXT)

    def losses(policy: Policy):
        nll = evaluator.quality(policy, windows["report"], resident=False).nll
        return nll[:, BUDGET - 1 :].astype(np.float64)

    search = windows["search"]
    measures = {
        ("NLL", 10, 768): rise(evaluator, search[:1, :768], 10),
        ("NLL", shape.layers, 768): rise(evaluator, search[:1, :768], shape.layers),
        ("KL", shape.layers, 768): sensitivity.measure(
            evaluator, search[:1, :768], groups=shape.layers
        ),
        ("KL", shape.layers, 2048): sensitivity.measure(
            evaluator, search[:1, :2048], groups=shape.layers
        ),
    }
    full, even = losses(Policy()), losses(build(KNOBS, setting))
    rows = [row(("even", 0, 0), 0.0, full, even, even)]
    for measure, per_layer in measures.items():
        for exponent in EXPONENTS:
            knobs = KNOBS | {"budgets": "sensitivity", "exponent": exponent}
            policy = build(knobs, replace(setting, sensitivity=tuple(per_layer)))
            rows.append(row(measure, exponent, full, even, losses(policy)))
    with Path(__file__).with_name("results.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def rise(evaluator: Evaluator, windows, groups: int) -> Sequence[float]:
    """Layer sensitivity as the rise in NLL; `kvsearch run` uses the KL divergence instead."""
    layers, tokens = evaluator.loaded.shape.layers, windows.shape[1]
    slots = int(sensitivity.KEPT * tokens)
    full, rises = evaluator.quality(Policy(), windows, resident=False).nll, np.zeros(layers)
    for members in np.array_split(np.arange(layers), groups):
        starved = sensitivity.starving(members.tolist(), layers, slots, tokens)
        nll = evaluator.quality(starved, windows, resident=False).nll
        rises[members] = float((nll - full)[:, slots:].mean()) / len(members)
    return tuple((np.maximum(rises, LEAST * rises.mean()) / rises.mean()).tolist())


def row(measure: tuple[str, int, int], exponent: float, full, even, mine) -> dict[str, object]:
    """One tidy row, echoed."""
    d = paired(mine, even)
    numbers = {"dnll_full": (mine - full).mean(), "dnll_even": d.mean, "lo": d.lo, "hi": d.hi}
    found: dict[str, object] = dict(zip(("harm", "groups", "tokens"), measure, strict=True))
    found |= {"exponent": exponent, "n": mine.size}
    found |= {k: f"{v:.4f}" for k, v in numbers.items()}
    click.echo(found)
    return found


if __name__ == "__main__":
    main()
