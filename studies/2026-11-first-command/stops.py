"""How often a report row as good as the recommended policy would be stopped before its last window.

A row is stopped where search and report text together are certain, by a t quantile over short
blocks of two windows at the first look, of three at the second. Here every row that has all report
windows is moved to equal loss (the mean of its differences over all windows becomes 0), and every
choice of two, or three, of its windows is judged as the run does, but on blocks of 64 tokens where
a run has 80. Rows of one text share their opponent, and choices share windows.
"""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, common, standard_error
from kvsearch.results.student_t import quantile
from kvsearch.run import summarise
from kvsearch.run.report_windows import FALSE

LOOKS = 3  # of a run with four windows


def differences(folder: Path) -> list[Blocks]:
    """Of each row with all report windows: its losses minus the recommended policy's."""
    run = RunFolder(folder, write=False)
    found = summarise.read(run)
    start = json.loads((folder / "study.json").read_text())["settings"]["score_from"] - 1
    best = found.row(found.recommended or "")
    out = []
    for row in found.rows:
        if row.kind in ("full", "searched") or row.name == best.name or row.stopped is not None:
            continue
        sums, tokens = [], None
        for part in ("search", "report"):
            pair = [run.losses(part, r.fingerprint, start) for r in (row, best)]
            a, b = common(*pair)
            sums.append(a.sums - b.sums)
            tokens = a.tokens
        assert tokens is not None
        out.append(Blocks(np.concatenate(sums), tokens))
    return out


def stopped(sums: NDArray[np.float64], tokens: NDArray[np.int64], false: float) -> bool:
    """Whether windows with these sums would stop a row."""
    x = Blocks(sums, tokens)
    return x.mean() > quantile(1 - false, x.count - 1) * standard_error(x, int(tokens[0]))


def table(records: Path) -> list[dict[str, object]]:
    """A row for each text."""
    rows = []
    for folder in sorted(records.iterdir()):
        found = differences(folder)
        count = len(json.loads((folder / "frozen.json").read_text())["rows"])
        row: dict[str, object] = {"text": folder.name, "rows": len(found)}
        for windows in (2, 3):
            verdicts = []
            for d in found:
                equal = d.sums - d.mean() * d.tokens
                verdicts += [
                    stopped(equal[list(some)], d.tokens, FALSE / (count * LOOKS))
                    for some in combinations(range(len(equal)), windows)
                ]
            row |= {f"choices_{windows}": len(verdicts), f"stopped_{windows}": sum(verdicts)}
        rows.append(row)
    return rows
