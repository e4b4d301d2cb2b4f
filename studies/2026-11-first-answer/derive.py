"""What the search expected to gain by further proposals, and what it gained, in kept runs.

    python derive.py --out FOLDER

`hope.csv`: a row per kept run that began from a portfolio, and number of proposals by then. `hope`
is `Kvei.hope` on the search text; `gained` is what the best policy that the search proposed loses
less than the best of the portfolio, on report text, at the end of the run.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from kvsearch.app import summary
from kvsearch.files import write_atomic
from kvsearch.knobs import Setting
from kvsearch.policy import HeadLosses
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.samplers import Context
from kvsearch.policy_search.samplers.kvei import Kvei
from kvsearch.policy_search.study import Study
from kvsearch.space import load

HERE = Path(__file__).parent
HEADS = resources.files("kvsearch.evaluation") / "heads" / "b179c9523d0e6a0f.json"
OUTCOME = sorted((HERE.parent / "2026-11-outcome").glob("b*-portfolio"))
FIRST = sorted((HERE.parent / "2026-11-first-command" / "records").iterdir())
AFTER = (0, 6, 12, 24, 48)


def row(run: Path, losses: HeadLosses) -> Iterator[dict[str, object]]:
    """Hope after some proposals of a run, and its end."""
    asked = json.loads((run / "study.json").read_text())
    found = summary.read(RunFolder(run, write=False))
    report = {
        kind: min((r.nll for r in found.rows if r.kind == kind and r.within_budget), default=None)
        for kind in ("earlier", "searched")
    }
    budget, shape = found.budget_bytes, summary.shape_from(asked["model"])
    space = load("default")
    context = Context(space, Setting(shape, budget, asked["settings"]["context"], heads=losses))
    done = [
        t
        for t in found.trials
        if t.number >= 0 and t.state in ("complete", "duplicate") and t.params
    ]
    done = [t for t in done if space.params(t.params) is not None]
    proposed = sum(t.kind == "searched" for t in done)
    for n in AFTER:
        if n > proposed:
            return
        last = [t.number for t in done if t.kind == "searched"][:n]
        known = [t for t in done if t.kind != "searched" or t.number in last]
        study = Study(space, lambda seed: Kvei(seed, context), 0, budget)
        study.restore(known)
        yield {
            "run": run.name,
            "slots": asked["settings"]["budget_slots"],
            "windows": asked["settings"]["context"],
            "after": n,
            "hope": f"{Kvei(0, context).hope(study.optuna_study):.4f}",
            "gained": ""
            if report["searched"] is None
            else f"{report['earlier'] - report['searched']:.4f}",
        }


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, required=True)
    out = ask.parse_args().out
    losses = HeadLosses.read(json.loads(HEADS.read_text())["losses"])
    rows = [r for run in [*OUTCOME, *FIRST] for r in row(run, losses)]
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "hope.csv", text.getvalue())


if __name__ == "__main__":
    main()
