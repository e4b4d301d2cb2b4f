"""What the searches of the first command are worth on eight windows of text that they did not see.

    python studies/2026-11-generalisation/measure.py --wikitext FILE --sotu FILE [--only NAME ...]

For each run of `studies/2026-11-first-command`: the full cache, the recommended policy, and the
best published method, textbook combination and portfolio point *of the search text*, on eight
windows of the run's report text. Nothing is searched anew. One file of losses a text, in `losses`;
texts that are there are skipped.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Policy
from kvsearch.results.folder import RunFolder
from kvsearch.session.make_windows import text

HERE = Path(__file__).parent
FIRST = HERE.parent / "2026-11-first-command"
WINDOWS = 8
OPPONENTS = {"method": "published", "combined": "combination", "earlier": "portfolio"}


def chosen(run: RunFolder) -> Iterator[tuple[str, str, Policy]]:
    """Role, name and policy: the full cache, what was recommended, and the best of each kind."""
    measured = json.loads((run.path / "measured.json").read_text())
    trials = {t.name: t for t in run.trials() if t.state == "complete"}
    yield "full", "full", Policy(name="full")
    yield "recommended", measured["recommended"], trials[measured["recommended"]].policy
    for kind, role in OPPONENTS.items():
        of_kind = [t for t in trials.values() if t.kind == kind]
        best = min(of_kind, key=lambda t: searched(run, t.fingerprint))
        yield role, best.name, best.policy


def searched(run: RunFolder, fingerprint: str) -> float:
    """Mean loss on the first window of the search text, which every policy has."""
    start = json.loads((run.path / "study.json").read_text())["settings"]["score_from"] - 1
    found = run.losses("search", fingerprint, start)
    return float(found.sums[0].sum() / found.tokens.sum())


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--only", nargs="*", default=[])
    ask.add_argument("--threads", type=int, default=2)
    o = ask.parse_args()
    torch.set_num_threads(o.threads)
    sys.path.insert(0, str(FIRST))
    from measure import texts  # that of the first command

    evaluator = Evaluator(load_model())
    for name, options in texts(o.wikitext, o.sotu).items():
        file = HERE / "losses" / f"{name}.csv"
        if file.exists() or (o.only and name not in o.only):
            continue
        run = RunFolder(FIRST / "four-windows" / name, write=False)
        asked = json.loads((run.path / "study.json").read_text())
        given = RunConfig(text=tuple(options[1:]), windows=1, report_windows=WINDOWS)
        found = text(evaluator.loaded, given, print)
        same = found.parts.report.token_sha256 == asked["text"]["report"]["token_sha256"]
        assert same, f"{name} is not the text of the run"
        start, rows = asked["settings"]["score_from"] - 1, []
        for role, policy_name, policy in chosen(run):
            nll = evaluator.quality(policy, found.parts["report"].beginnings, resident=False).nll[
                :, start:
            ]
            for window, losses in enumerate(nll):
                rows.append(
                    [role, policy_name, window, losses.size, f"{losses.sum(dtype=float):.6f}"]
                )
            print(f"{name}: {role} {policy_name}, {nll.mean():.4f} nats a token", flush=True)
        file.parent.mkdir(exist_ok=True)
        lines = [["role", "policy", "window", "tokens", "nats"], *rows]
        write_atomic(file, "".join(",".join(map(str, line)) + "\n" for line in lines))


if __name__ == "__main__":
    main()
