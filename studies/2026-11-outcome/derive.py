"""From the losses of the runs to the three comparisons with opponents at each budget.

    python derive.py --out FOLDER

For each line of `targets.csv` there are two runs: the search (`bN`, and the repeated searches),
and H2O + 4 bits tuned by random search with about as many tokens (`h2o-int4-` and the same name, or
its beginning). Both were measured on the same report text and on State of the Union.
`comparisons.csv` has a row per opponent.
"""

import argparse
import csv
import io
import json
from functools import cached_property
from pathlib import Path

import numpy as np

from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, corrected, paired

HERE = Path(__file__).parent
PARTS = {"report": "WikiText-2 report", "extra0": "sotu report"}
FORMERLY = {"extra0": "also0"}  # names in older runs
TUNED = "h2o+int4 tuned"
TEXTBOOK = 0.05  # of PPL, below every published method and textbook combination
GAP = 0.4  # of the tuned opponent's distance to the full cache
FINE = "h2o+int4-fine"  # a combination, but not at textbook settings


class Kept:
    """One kept run: its rows and their losses."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path, write=False)
        self.asked = json.loads((path / "study.json").read_text())
        self.measured = json.loads((path / "measured.json").read_text())
        self.rows = {r["name"]: r for r in self.measured["rows"]}
        self.start = self.asked["settings"]["score_from"] - 1

    def nll(self, part: str, name: str) -> Blocks | None:
        """Scored losses, if they were measured."""
        key = self.rows[name]["fingerprint"]
        for known_as in (part, FORMERLY.get(part, part)):
            if self.folder.has_losses(known_as, key):
                return self.folder.losses(known_as, key, self.start)
        return None

    @property
    def recommended(self) -> str:
        return self.measured["recommended"]

    @property
    def budget(self) -> int:
        """In fp16 slots a layer, whatever the settings call it."""
        asked = self.asked["settings"]
        return int(asked["budget_slots"] if "budget_slots" in asked else asked["budget"])

    @cached_property
    def tokens(self) -> int:
        """Search tokens evaluated."""
        return sum(t.tokens for t in self.folder.trials())


def rows(run: str, mine: Kept, tuned: Kept) -> list[dict]:
    """The recommended policy against every opponent of one search, on both texts."""
    out = []
    opponents = [(mine, n, r["kind"]) for n, r in mine.rows.items()]
    opponents = [o for o in opponents if o[2] != "searched"]
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
                    "run": run,
                    "budget": mine.budget,
                    "text": label,
                    "policy": mine.recommended,
                    "opponent": name if kind != "tuned" else TUNED,
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


def targets(found: list[dict]) -> list[dict]:
    """Per search: the nearest opponent of each comparison, and whether the target is met."""
    out = []
    for run in dict.fromkeys(r["run"] for r in found):
        every = [r for r in found if r["run"] == run]
        rows = [r for r in every if r["kind"] not in ("full", "earlier")]
        full = next(r for r in every if r["kind"] == "full" and r["text"] == PARTS["report"])
        report = [r for r in rows if r["text"] == PARTS["report"]]
        textbook = [r for r in report if r["kind"] != "tuned" and r["opponent"] != FINE]
        near = max(textbook, key=lambda r: r["dnll"])
        tuned = next(r for r in report if r["kind"] == "tuned")
        other = max((r for r in rows if r["text"] == PARTS["extra0"]), key=lambda r: r["lo"])
        below = 1 - float(np.exp(near["dnll"]))
        earlier = {k: nearest_earlier(every, label) for k, label in PARTS.items()}
        out.append(
            {
                "run": run,
                "textbook": near["opponent"],
                "ppl_below": below,
                "full_below": 1 - full["opponent_ppl"] / near["opponent_ppl"],
                "a": "met" if below >= TEXTBOOK else "missed",
                "tuned_dnll": tuned["dnll"],
                "tuned_lo": tuned["lo"],
                "tuned_hi": tuned["hi"],
                "gap_closed": tuned["gap_closed"],
                "b": "met" if tuned["hi"] < 0 and tuned["gap_closed"] >= GAP else "missed",
                "sotu": other["opponent"],
                "sotu_dnll": other["dnll"],
                "sotu_lo": other["lo"],
                "sotu_hi": other["hi"],
                "c": "missed" if other["lo"] > 0 else "met",
            }
            | {f"earlier_{k}_{x}": v for k, row in earlier.items() for x, v in row.items()}
        )
    return out


def nearest_earlier(rows: list[dict], text: str) -> dict:
    """The nearest policy of the portfolio on a text, which is no opponent; empty without one."""
    names = ("opponent", "dnll", "lo", "hi")
    mine = [r for r in rows if r["kind"] == "earlier" and r["text"] == text]
    near = max(mine, key=lambda r: r["dnll"], default=dict.fromkeys(names, ""))
    return {name: near[name] for name in names}


def table(rows: list[dict]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: f"{v:.5f}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def tuned(run: str) -> Path:
    """The tuned opponent of a search: that with the longest common name."""
    mine = [p for p in HERE.glob("h2o-int4-*/") if run.startswith(p.name.removeprefix("h2o-int4-"))]
    return max(mine, key=lambda p: len(p.name))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    found = []
    for path in sorted(HERE.glob("b[0-9]*/")):
        found += rows(path.name, Kept(path), Kept(tuned(path.name)))
    (out / "comparisons.csv").write_text(table(found), newline="\n")
    (out / "targets.csv").write_text(table(targets(found)), newline="\n")


if __name__ == "__main__":
    main()
