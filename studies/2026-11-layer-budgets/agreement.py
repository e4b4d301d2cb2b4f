"""Agreement of windows of one text on layer sensitivity.

Sensitivity of groups of three layers, as a default run measures it, on six windows of the search
text. Rows of agreement.csv are correlations of the logarithms between windows of the same length.

    python studies/2026-11-layer-budgets/agreement.py --text wikitext2-test.raw
"""

import csv
from itertools import combinations
from pathlib import Path

import click
import numpy as np

from kvsearch.evaluation import sensitivity
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import load_model
from kvsearch.session.make_windows import TextOptions, text
from kvsearch.session.progress import Shown

LENGTHS, WINDOWS, GROUPS = (512, 768), 6, 10


@click.command()
@click.option("--text", "file", required=True, help="FILE; only bytes below 900000 are used")
def main(file: str) -> None:
    """Measure and write agreement.csv."""
    shown, loaded = Shown(quiet=True), load_model()
    options = TextOptions((f"{file}:0-900000",), None, (f"{file}:900000-",), 2048, WINDOWS, 1)
    windows, evaluator = (
        text(loaded, options, shown.say).parts["search"].beginnings,
        Evaluator(loaded),
    )
    rows = []
    for length in LENGTHS:
        logs = np.log(
            [sensitivity.measure(evaluator, w[None, :length], groups=GROUPS) for w in windows]
        )
        pairs = [np.corrcoef(logs[i], logs[j])[0, 1] for i, j in combinations(range(WINDOWS), 2)]
        low, mid, high = np.quantile(pairs, [0, 0.5, 1])
        rows.append(
            {
                "tokens": length,
                "windows": WINDOWS,
                "groups": GROUPS,
                "least": f"{low:.3f}",
                "median": f"{mid:.3f}",
                "most": f"{high:.3f}",
            }
        )
    with Path(__file__).with_name("agreement.csv").open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0].keys(), lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    main()
