"""What the first command said on six texts, and what searches expected to gain by proposals.

    python derive.py --out FOLDER

`first-answer.csv`: the columns of `studies/2026-11-first-command`, then how many of eight facts
the full cache, the recommended policy and the best published method gave exactly, and how many
policies the search proposed. `other-budgets.csv`: the same of wikitext-1 at 64 and 128 slots.
`hope.csv`: a row per kept run that began from a portfolio, and number of proposals by then. `hope`
is `Kvei.expected_gain` on the search text; `gained` is what the best policy that the search
proposed loses less than the best of the portfolio, on report text, at the end of the run.
"""

import argparse
import csv
import io
import json
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from kvsearch.files import write_atomic
from kvsearch.policy import HeadLosses
from kvsearch.policy_search.optuna_study import Study as OptunaStudy
from kvsearch.policy_search.samplers import Context
from kvsearch.policy_search.samplers.kvei import Kvei
from kvsearch.policy_space import Setting, load
from kvsearch.results import run_files
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import corrected
from kvsearch.results.records import REPORT, Recheck
from kvsearch.results.study import Study
from kvsearch.run import summarise
from kvsearch.run.report_windows import looks

HERE = Path(__file__).parent
FIRST_COMMAND = HERE.parent / "2026-11-first-command"
HEADS = resources.files("kvsearch.model_analysis") / "heads" / "b179c9523d0e6a0f.json"
OUTCOME = sorted((HERE.parent / "2026-11-outcome").glob("b*-portfolio"))
FIRST = sorted((FIRST_COMMAND / "records").iterdir())
AFTER = (0, 6, 12, 24, 48)


def row(run: Path, losses: HeadLosses) -> Iterator[dict[str, object]]:
    """Hope after some proposals of a run, and its end."""
    found = summarise.read(RunFolder(run, write=False))
    report = {
        kind: min((r.nll for r in found.rows if r.kind == kind and r.within_budget), default=None)
        for kind in ("earlier", "searched")
    }
    budget, shape = found.budget_bytes, found.study.shape
    space = load(str(HERE / "space.yaml"))
    context = Context(space, Setting(shape, budget, found.settings.context, heads=losses))
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
        study = OptunaStudy(space, lambda seed: Kvei(seed, context), 0, budget)
        study.restore(known)
        yield {
            "run": run.name,
            "slots": found.settings.budget_slots,
            "windows": found.settings.context,
            "after": n,
            "hope": f"{Kvei(0, context).expected_gain(study.optuna_study):.4f}",
            "gained": ""
            if report["searched"] is None
            else f"{report['earlier'] - report['searched']:.4f}",
        }


def said(run: Path) -> dict[str, object]:
    """What the first command said of one text."""
    sys.path.insert(0, str(FIRST_COMMAND))
    from derive import difference  # of that study
    from derive import row as first_command

    exact = json.loads((run / "measured.json").read_text())["needles"]["exact"]
    folder = RunFolder(run, write=False)
    trials = summarise.read(folder).trials
    names = ("facts_full", "facts_recommended", "facts_published")
    found = first_command(run) | dict(zip(names, exact.values(), strict=True))
    for label, recheck in headline(folder).items():
        found |= difference(label, recheck)
    found["proposals"] = sum(t.kind == "searched" and t.state == "complete" for t in trials)
    del found["seconds"]  # other work ran beside these
    return found


def headline(folder: RunFolder) -> dict[str, Recheck]:
    """Opponents as the run chose them: the best of a kind among those on the most windows."""
    asked = Study.read(folder.path / "study.json")
    of = summarise.comparison(folder, asked, run_files.measured(folder.path / "measured.json"))
    looked = looks(asked.settings.report_windows, asked.settings.headline_windows or 0)
    found, best = {}, of.recommended or ""
    for kind, label in {
        "method": "published",
        "combined": "combination",
        "earlier": "earlier",
    }.items():
        mine = [n for n, e in of.entries.items() if e.kind == kind and n != best]
        most = max((of.tokens(n) for n in mine), default=0)
        last = min(
            (n for n in mine if of.tokens(n) == most), key=lambda n: of.loss[n], default=None
        )
        if last is not None:
            level = corrected(1 if kind == "earlier" else len(looked))
            found[label] = Recheck(REPORT, best, last, of.difference(best, last, level), most)
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, required=True)
    out = ask.parse_args().out
    losses = HeadLosses.read(json.loads(HEADS.read_text())["losses"])
    tables: dict[str, list[dict[str, object]]] = {
        "first-answer.csv": [said(run) for run in sorted((HERE / "records").iterdir())],
        "other-budgets.csv": [said(run) for run in sorted((HERE / "zoo").iterdir())],
        "hope.csv": [r for run in [*OUTCOME, *FIRST] for r in row(run, losses)],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        text = io.StringIO()
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_atomic(out / name, text.getvalue())


if __name__ == "__main__":
    main()
