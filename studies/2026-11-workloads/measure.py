"""What methods and searched policies keep of a prompt, at equal bytes.

    python studies/2026-11-workloads/measure.py TASK ... [--parts 4 8 16] [--see aware] [--only ...]
        [--items 25] [--model FILE.gguf --name NAME]

Policies: published methods as published; their rules with budgets by what heads lose, and with keys
in 5 and values in 4 bits, at the same bytes; combinations by hand; the points that every search
begins with; and those that searches found (`found/*.json`, see `search.py`). NLL and exactness of
every answer go to `records/TASK-SEE.json`, of a second model to `records/TASK-SEE-NAME.json`; rows
that the file has are kept. Items are of the report part, which no search and no point saw. `long`
is `needle4` in contexts of 4000 tokens. TASK `text` is the report part of the built-in text in
windows of 640 tokens: what policies found on tasks lose there (`records/text.json`).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from kvsearch.commands.heads import heads
from kvsearch.errors import PolicyError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.models.load import LoadedModel
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Policy, layout
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.portfolio import load
from kvsearch.session.context_worth import bare, groups
from kvsearch.session.make_windows import text
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import SEES, parse
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
LEARNED = HERE.parent / "2026-11-head-prices" / "learned.yaml"
TOKENS, WINDOWS = 640, 8  # of `text`
TASKS = {
    "needle1": "needle,tokens=640",
    "needle4": "needle:4,asks=4,tokens=640",
    "long": "needle:4,asks=4,tokens=4000",
    "recall": "recall,tokens=600",
    "qa": "qa,tokens=640",
    "chains": "chains,tokens=640",
    "instructions": "instructions,tokens=640",
    "vt": "ruler/vt,tokens=640",
}
PUBLISHED = (
    "random-prompt", "streamingllm", "h2o", "tova", "snapkv-prompt", "pyramidkv-prompt", "keydiff",
    "expected-attention-mean", "criticalkv-prompt", "chunkkv-prompt", "defensivekv-prompt", "kvzip",
)  # fmt: skip
BY_HAND = ("h2o+int4-fine", "rotated+heads")
KVZIP = "kvzip+k5v4"
WITH_HEADS = ("snapkv-prompt", "criticalkv-prompt", "defensivekv-prompt")
BITS = {"tiers": "k5v4", "rotate": True, "levels": "lloyd", "group": "head"}
OURS = {"budgets": "heads", "exponent": 1.0, **BITS}


def policies(setting: Setting) -> dict[str, Policy]:
    """All that fit the budget, by name."""
    points = {name: dict(point.knobs) for name, point in load(str(LEARNED)).items()}
    known = {name: dict(METHODS[name].knobs) for name in (*PUBLISHED, *BY_HAND, KVZIP)} | points
    known |= {f"{name}, our heads and bits": {**METHODS[name].knobs, **OURS} for name in WITH_HEADS}
    found: dict[str, Policy] = {}
    for name, knobs in known.items():
        try:
            found[name] = build(knobs, setting, name=name)
        except PolicyError as e:
            print(f"{name}: {e}", flush=True)
    return found


def searched(part: int, setting: Setting) -> dict[str, Policy]:
    """What searches found for this share: on the task itself, on another, on a text.

    Contexts of other lengths have other budgets: a policy that is too large gets fewer slots.
    """
    found = dict[str, Policy]()
    for file in sorted((HERE / "found").glob(f"*-{part}.json")):
        policy, on = Policy.from_json(file), file.stem.rpartition("-")[0]
        if policy.trigger == "prompt" and not setting.prompt:
            continue  # it evicts nothing of a text
        while policy.slots and peak(policy, setting) > (setting.budget_bytes or 0):
            policy = policy.model_copy(update={"slots": policy.slots - 1})
        found[f"found on {on}"] = policy
    return found


def on_text(loaded: LoadedModel, parts: list[int]) -> None:
    """NLL of what searches found on windows of the text, after as many tokens as a policy holds."""
    evaluator, file = Evaluator(loaded), HERE / "records" / "text.json"
    given = RunConfig(context=TOKENS, windows=1, report_windows=WINDOWS)
    ids = text(loaded, given, lambda _: None).parts["report"].beginnings[:WINDOWS]
    rows = json.loads(file.read_text()) if file.exists() else {}
    for part in parts:
        size = loaded.shape.budget_bytes(TOKENS // part)
        setting = Setting(loaded.shape, size, TOKENS, heads=heads(loaded).losses)
        here = {"full": Policy(name="full"), **searched(part, setting)}
        known = {name: METHODS[name] for name in ("h2o", "streamingllm", *BY_HAND)}
        for name, method in (known | load(str(LEARNED))).items():
            here[name] = build(dict(method.knobs), setting, name=name)
        cell = rows.setdefault(f"1/{part}", {})
        for name, policy in here.items():
            if name not in cell:
                nll = evaluator.quality(policy, ids, resident=False).nll[:, TOKENS // part :]
                cell[name] = [round(float(x), 4) for x in nll.mean(1)]
                print("text", part, name, f"{np.mean(cell[name]):.4f}", flush=True)
                write_atomic(file, json.dumps(rows) + "\n")


def peak(policy: Policy, setting: Setting) -> int:
    """Bytes per sequence between calls, at most."""
    return layout(policy, setting.shape).bytes_peak(setting.tokens, setting.prompt)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("tasks", nargs="+", choices=[*TASKS, "text"], metavar="TASK")
    ask.add_argument("--parts", nargs="*", type=int, default=[8], help="1/4, 1/8, 1/16")
    ask.add_argument("--see", choices=SEES, default="agnostic")
    ask.add_argument("--only", nargs="*", default=[], metavar="POLICY")
    ask.add_argument("--items", type=int, default=25, help="contexts")
    ask.add_argument("--model", default="smollm2-135m")
    ask.add_argument("--name", default="", help="of another model, in the records")
    o = ask.parse_args()
    loaded = load_model(o.model)
    evaluator, losses = Evaluator(loaded), heads(loaded).losses
    tokens = tokenize(loaded.tokenizer, builtin())
    if "text" in o.tasks:
        on_text(loaded, o.parts)
    for task in [t for t in o.tasks if t != "text"]:
        spec = parse(TASKS[task])
        (prompts,) = from_tasks(
            loaded, [spec], tokens.ids, tokens.start, o.see, o.items, 0, "report"
        )
        file = HERE / "records" / f"{'-'.join([task, o.see, *o.name.split()])}.json"
        rows = json.loads(file.read_text()) if file.exists() else {"groups": groups(prompts)}
        todo = {("all", "full"): Policy(name="full"), ("all", "empty"): Policy()}
        for part in o.parts:
            size = loaded.shape.budget_bytes(spec.tokens // part)
            setting = Setting(loaded.shape, size, prompts.longest, prompts.prompt, heads=losses)
            here = policies(setting) | ({} if o.name else searched(part, setting))
            todo |= {(f"1/{part}", n): p for n, p in here.items() if not o.only or n in o.only}
        setting = Setting(loaded.shape, None, prompts.longest, prompts.prompt)
        for (share, name), policy in todo.items():
            if name in rows.setdefault(share, {}):
                continue
            some = bare(prompts, loaded) if name == "empty" else prompts
            found = answers(evaluator, policy, some, resident=False)
            rows[share][name] = {
                "nll": [round(float(x), 4) for x in found.nll],
                "exact": [int(x) for x in found.exact],
                "bytes_peak": peak(policy, setting),
                "seconds": round(found.seconds, 1),
            }
            print(
                task,
                o.see,
                share,
                name,
                f"{found.nll.mean():.3f}",
                f"{found.exact.mean():.2f}",
                flush=True,
            )
            write_atomic(file, json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
