"""From the runs to one row a text: what was recommended, and by how much it is ahead.

`first-command.csv`, and `stops.csv` (see `stops.py`); `python derive.py --out FOLDER`. Differences
are dNLL on the report text, nats per token, negative where the recommended policy is better:
against the best published method and the best textbook combination of that text, with 95 %
intervals as the run prints them, and against the best policy that earlier searches found.
`worse_than` are the rows within the budget that are ahead of it with an interval corrected for all
rows of the run.
"""

import argparse
import csv
import json
from pathlib import Path

import stops

from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, common, corrected, paired
from kvsearch.results.records import Recheck
from kvsearch.results.summary import Summary
from kvsearch.run import summarise

HERE = Path(__file__).parent
KINDS = {"method": "published", "combined": "combination", "earlier": "earlier"}


def row(folder: Path) -> dict[str, object]:
    """What one run says."""
    run = RunFolder(folder, write=False)
    found = summarise.read(run)
    assert found.recommended is not None
    mine = found.row(found.recommended)
    against = {
        found.row(r.against).kind: r for r in found.rechecks if r.policy == found.recommended
    }
    out: dict[str, object] = {
        "text": folder.name, "seconds": round(found.seconds), "recommended": mine.name,
        "kind": mine.kind, "dnll_full": f"{mine.dnll_full.mean:.4f}", "n": mine.tokens,
    }  # fmt: skip
    for kind, label in KINDS.items():
        out |= difference(label, against.get(kind))
    return out | {"worse_than": "; ".join(ahead(run, found))}


def difference(label: str, r: Recheck | None) -> dict[str, object]:
    names = (label, f"{label}_dnll", f"{label}_lo", f"{label}_hi", f"{label}_n")
    if r is None:
        return dict.fromkeys(names, "")
    d = r.dnll
    return dict(
        zip(names, (r.against, *(f"{x:.4f}" for x in (d.mean, d.lo, d.hi)), r.tokens), strict=True)
    )


def ahead(run: RunFolder, found: Summary) -> list[str]:
    """Rows within the budget that are certainly better than the recommended policy."""
    start = json.loads((run.path / "study.json").read_text())["settings"]["score_from"] - 1

    def losses(name: str) -> Blocks:
        return run.losses("report", found.row(name).fingerprint, start)

    rivals = [r.name for r in found.rows if r.within_budget and r.name != found.recommended]
    level = corrected(len(found.rows) - 1)
    best = losses(found.recommended or "")
    return [n for n in rivals if paired(*common(best, losses(n)), level=level).lo > 0]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    o = ask.parse_args()
    found = {
        "first-command.csv": [row(p) for p in sorted((HERE / "records").iterdir())],
        "stops.csv": stops.table(HERE / "records"),
    }
    for name, rows in found.items():
        with open(o.out / name, "w", newline="") as f:
            writer = csv.DictWriter(f, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
