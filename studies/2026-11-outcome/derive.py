"""From the per-token losses of the runs to the three comparisons of each budget.

    python derive.py --out FOLDER

For each budget there are two runs: the search, and H2O + 4 bits tuned by random search with about
the same number of tokens. Both were measured on the same report text and on State of the Union.
"""

import argparse
import csv
import io
import json
from pathlib import Path

import numpy as np

from kvsearch.search.folder import RunFolder
from kvsearch.stats import corrected, paired

HERE = Path(__file__).parent
PARTS = {"report": "WikiText-2 report", "also0": "sotu report"}


class Kept:
    """One kept run: its rows and their losses."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path, write=False)
        self.asked = json.loads((path / "study.json").read_text())
        self.measured = json.loads((path / "measured.json").read_text())
        self.rows = {r["name"]: r for r in self.measured["rows"]}
        self.start = self.asked["settings"]["score_from"] - 1

    def nll(self, part: str, name: str) -> np.ndarray | None:
        """Scored losses `[W, T]` in nats, if they were measured."""
        key = self.rows[name]["fingerprint"]
        if not self.folder.has_nll(part, key):
            return None
        return self.folder.load_nll(part, key)[0][:, self.start :]

    @property
    def recommended(self) -> str:
        return self.measured["recommended"]

    @property
    def tokens(self) -> int:
        """Search tokens evaluated."""
        return sum(t.tokens for t in self.folder.trials())


def rows(budget: int, mine: Kept, tuned: Kept) -> list[dict]:
    """The recommended policy against every opponent of one budget, on both texts."""
    out = []
    opponents = [(mine, n, r["kind"]) for n, r in mine.rows.items() if r["kind"] != "found"]
    opponents.append((tuned, tuned.recommended, "tuned"))
    for part, label in PARTS.items():
        best, full = mine.nll(part, mine.recommended), mine.nll(part, "full")
        if best is None or full is None:
            continue
        measured = [(k, n, kind, k.nll(part, n)) for k, n, kind in opponents]
        measured = [m for m in measured if m[3] is not None]
        level = corrected(len(measured))
        for _, name, kind, theirs in measured:
            d = paired(best, theirs, level=level)
            out.append(
                {
                    "budget": budget,
                    "text": label,
                    "policy": mine.recommended,
                    "opponent": name if kind != "tuned" else "h2o+int4 tuned",
                    "kind": kind,
                    "n": best.size,
                    "ppl": float(np.exp(best.mean())),
                    "opponent_ppl": float(np.exp(theirs.mean())),
                    "dnll": d.mean,
                    "lo": d.lo,
                    "hi": d.hi,
                    "gap_closed": float(-d.mean / (theirs.mean() - full.mean()))
                    if kind != "full"
                    else "",
                    "search_tokens": mine.tokens,
                    "opponent_search_tokens": tuned.tokens if kind == "tuned" else "",
                }
            )
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    found = []
    for path in sorted(HERE.glob("b*"), key=lambda p: int(p.name[1:])):
        budget = int(path.name[1:])
        found += rows(budget, Kept(path), Kept(HERE / f"h2o-int4-b{budget}"))
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
    table.writeheader()
    for row in found:
        table.writerow({k: f"{v:.5f}" if isinstance(v, float) else v for k, v in row.items()})
    (out / "comparisons.csv").write_text(text.getvalue())


if __name__ == "__main__":
    main()
