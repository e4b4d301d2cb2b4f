"""Candidates for the portfolio on prompts and answers, with head budgets by `kvsearch heads`.

    python studies/2026-11-head-prices/measure_prompts.py [--only NAME ...] [--split report]

Needles of 640 tokens, question-agnostic, at an eighth and a sixteenth of the context's slots.
Points are learned on the search part of the tasks; figures are of the report part, which has other
passages and facts. NLL and exactness of every answer go to records/prompts/TASK-bBUDGET.json, or
records/prompts-report/; rows that the file has are kept.
"""

import argparse
import contextlib
import json
from pathlib import Path

from candidates import candidates, rereading

from kvsearch.commands.heads import heads
from kvsearch.errors import PolicyError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.session.context_worth import bare
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import parse
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
TASKS = ("needle:4,tokens=640", "needle,tokens=640")
BUDGETS, ITEMS = (80, 40), 12
PUBLISHED = ("h2o", "snapkv", "snapkv-prompt", "h2o+int4-fine")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--only", nargs="*", default=[], help="candidates")
    ask.add_argument("--tasks", nargs="*", default=TASKS)
    ask.add_argument("--budgets", nargs="*", type=int, default=BUDGETS)
    ask.add_argument("--split", choices=("search", "report"), default="search")
    o = ask.parse_args()
    folder = "prompts" if o.split == "search" else "prompts-report"
    loaded = load_model()
    evaluator, losses = Evaluator(loaded), heads(loaded).losses
    tokens = tokenize(loaded.tokenizer, builtin())
    wanted = {name: knobs for name, (_, knobs) in candidates().items()}
    wanted |= {name: dict(METHODS[name].knobs) for name in PUBLISHED} | rereading()
    for task in o.tasks:
        spec = parse(task)
        (prompts,) = from_tasks(
            loaded, [spec], tokens.ids, tokens.start, "agnostic", ITEMS, 0, o.split
        )
        for budget in o.budgets:
            file = HERE / "records" / folder / f"{spec.label.replace(':', '')}-b{budget}.json"
            rows = json.loads(file.read_text()) if file.exists() else {}
            size = loaded.shape.budget_bytes(budget)
            setting = Setting(loaded.shape, size, prompts.longest, prompts.prompt, heads=losses)
            policies = {"full": Policy(name="full")}
            for name, knobs in wanted.items():
                with contextlib.suppress(PolicyError):
                    policies[name] = build(knobs, setting, name=name)
            for name in ("empty", *policies):
                if name in rows or (o.only and name not in ("full", "empty", *o.only)):
                    continue
                some = bare(prompts, loaded) if name == "empty" else prompts
                found = answers(evaluator, policies.get(name, Policy()), some, resident=False)
                rows[name] = {
                    "nll": [round(float(x), 4) for x in found.nll],
                    "exact": [int(x) for x in found.exact],
                }
                print(file.stem, name, f"{found.nll.mean():.3f}", found.exact.mean(), flush=True)
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(rows) + "\n", newline="\n")


if __name__ == "__main__":
    main()
