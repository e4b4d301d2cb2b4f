"""Merging what is evicted, and rules by head, against plain eviction of as many slots.

    python studies/2026-11-own-ideas/measure.py check
    python studies/2026-11-own-ideas/measure.py screen [TASK ...] [--items 1]
    python studies/2026-11-own-ideas/measure.py merge [TASK ...] [--items 25] [--contexts FOLDER]
    python studies/2026-11-own-ideas/measure.py sizes [TASK ...] [--items 25] [--contexts FOLDER]
    python studies/2026-11-own-ideas/measure.py bits [TASK ...] [--items 25] [--contexts FOLDER]
    python studies/2026-11-own-ideas/measure.py heads [TASK ...] [--items 3]
    python studies/2026-11-own-ideas/measure.py mix [TASK ...] [--items 25] [--contexts FOLDER]

`check` compares the harness with the package. `screen` tries every way to merge on the search part,
`merge` those of `REPORTED` on the report part, and `sizes` one of them with more and fewer slots;
`bits` has an eighth of the bytes in 5 and 4 bits and in 8.
`heads` measures on the search part what every KV head alone loses by each rule at its allowance;
`mix` compares the best rule of each head with single rules on the report part. Rows go to
`records/STEP-TASK.json`; contexts that the file has are kept. `--contexts` holds keys and values of
contexts, so that they are taken in once.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Context, Merge, Plain, Slots, cam, evicted, kept, merged, rounded, scores

from kvsearch.commands.heads import heads
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Budgets, Policy, layout
from kvsearch.rules import Attention, Reread
from kvsearch.session.context_worth import bare
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import Prompts, parse
from kvsearch.workloads.items import Ask, Item
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin
from kvsearch.workloads.text.windows import shares

HERE = Path(__file__).parent
TASKS = {
    "needle4": "needle:4,asks=4,tokens=640",
    "instructions": "instructions,tokens=640",
    "recall": "recall,tokens=600",
}
TEXT, CONTINUED = 640, 128  # tokens of a context of `text`, and after it
RECENT, ROOM, PART = 16, 32, 8  # newest slots; slots that the question takes; 1/8 of the context
SETS = {"h2o, even": ("h2o", "even"), "h2o, heads": ("h2o", "heads"), "kvzip": ("kvzip", "one")}
MERGES = {
    "count, values": Merge(log=False),
    "count, values, log": Merge(),
    "count, both": Merge(keys=True, log=False),
    "count, both, log": Merge(keys=True),
    "d2o": Merge("d2o", keys=True, log=False, above=True),
    "d2o, log": Merge("d2o", keys=True, above=True),
    "d2o, log, unrotated": Merge("d2o", keys=True, plain=True, above=True),
    "d2o, values, log": Merge("d2o", above=True),
    "attention, values, log": Merge("attention"),
    "attention, log only": Merge("attention", values=False),
    "attention, both, log": Merge("attention", keys=True),
    "attention, both, log, above": Merge("attention", keys=True, above=True),
    "attention, both, log, unrotated": Merge("attention", keys=True, plain=True),
    "attention, both, log, unrotated, above": Merge("attention", keys=True, plain=True, above=True),
}
OWN = "attention, both, log, unrotated"
EVEN = ("count, values, log", "d2o", "d2o, log")
REPORTED = {
    "h2o, even": None,
    "h2o, heads": ("d2o", "d2o, log"),
    "kvzip": (
        "d2o", "d2o, log", OWN, f"{OWN}, above",
    ),
}  # fmt: skip
# shares of the tokens in an eighth of the bytes: evicted, and with 2 bytes a slot for its bias
BITS = {(5, 4): (0.42, 0.41), (8, 8): (0.235, 0.232)}
SIZES = {"kvzip, 0.42": 0.42, "kvzip, 0.21": 0.21, "kvzip, 0.0625": 0.0625}  # of the tokens
RULES = ("h2o", "mean", "recent", "kvzip")  # of heads
ASKS = 1  # of a context, where heads are measured
Rows = dict[str, Any]


def budgeted(loaded: LoadedModel, task: str, kind: str, recent: int = RECENT) -> Policy:
    """A policy of the package by H2O that holds `PART` of the task's contexts after the prompt."""
    tokens, shape = tokens_of(task), loaded.shape
    own = Budgets(kind="sensitivity", weights=heads(loaded).losses.sensitivity, exponent=1.0)

    def made(slots: int) -> Policy:
        return Policy(
            slots=slots + ROOM, interval=ROOM, sinks=4, recent_window=recent, rule=Attention(),
            trigger="prompt", budgets=own if kind == "heads" else Budgets(),
        )  # fmt: skip

    def held(slots: int) -> int:
        return int(allowed(loaded, made(slots)).clamp_max(tokens).sum())

    most = tokens // PART * shape.layers * shape.kv_heads
    low, high = tokens // PART, tokens
    while high - low > 1:  # a head has no use for more slots than the context has tokens
        middle = (low + high) // 2
        low, high = (middle, high) if held(middle) <= most else (low, middle)
    return made(low)


def allowed(loaded: LoadedModel, policy: Policy) -> torch.Tensor:
    """Slots that every KV head keeps of a prompt `[L, H]`, as the package shares them out."""
    found = torch.zeros(loaded.shape.layers, loaded.shape.kv_heads, dtype=torch.int64)
    for part in layout(policy, loaded.shape).layers:
        found[part.layer, part.heads.start : part.heads.stop] = part.target or 0
    return found


def prompts(loaded: LoadedModel, task: str, count: int, split: str) -> Prompts:
    """Contexts of a task, or of the built-in text, whose continuation is an answer."""
    tokens = tokenize(loaded.tokenizer, builtin())
    if task in TASKS:
        (found,) = from_tasks(
            loaded, [parse(TASKS[task])], tokens.ids, tokens.start, "agnostic", count, 0, split
        )
        return found
    low, high = (round(share * tokens.ids.size) for share in shares()[split])
    size = TEXT + CONTINUED
    starts = [low + i * ((high - low - size) // max(1, count - 1)) for i in range(count)]
    made = []
    for i, start in enumerate(starts):
        ids = tokens.ids[start : start + size].astype(np.int64)
        ask = Ask(ids[:0], ids[TEXT:])
        made.append(Item(str(i), str(i), ids[:TEXT], (ask,)))
    return Prompts("text", tuple(made))


def masks(loaded: LoadedModel, context: Context, task: str) -> dict[str, torch.Tensor]:
    """Kept slots of every set of `SETS`."""
    found = {}
    for name, (rule, kind) in SETS.items():
        score = scores(rule, context, RECENT)
        if kind == "one":
            found[name] = kept(score, tokens_of(task) // PART, 0, across=True)
        else:
            found[name] = kept(score, allowed(loaded, budgeted(loaded, task, kind)), RECENT)
    return found


def tokens_of(task: str) -> int:
    """Tokens of a context."""
    return parse(TASKS[task]).tokens if task in TASKS else TEXT


def scored(found: list[torch.Tensor], item: Item) -> Iterator[tuple[list[float], list[int]]]:
    """NLL and exactness of every ask, a pair of rows for every cache."""
    for r in range(len(found[0])):
        nll, exact = [], []
        for log, ask in zip(found, item.asks, strict=True):
            target = torch.from_numpy(ask.answer)
            lost = -log[r].gather(-1, target[:, None])
            nll.append(round(float(lost.double().mean()), 4))
            exact.append(int((log[r].argmax(-1) == target).all()))
        yield nll, exact


def ways(
    step: str, loaded: LoadedModel, model: Plain, context: Context, task: str, i: int
) -> Iterator[tuple[str, Slots]]:
    """What a step compares on one context, by name."""
    yield "full", context.full
    if step == "mix":
        yield from mixes(loaded, context, task)
        return
    if step == "sizes":
        for name, share in SIZES.items():
            mask = kept(context.again, int(share * tokens_of(task)), 0, across=True)
            yield f"{name}: evicted", evicted(context, mask)
            yield f"{name}: {OWN}", merged(model, context, mask, MERGES[OWN])
        return
    if step == "bits":
        for bits, shares in BITS.items():
            way = f"kvzip, k{bits[0]}v{bits[1]}"
            few, fewer = (
                kept(context.again, int(s * tokens_of(task)), 0, across=True) for s in shares
            )
            yield f"{way}: evicted", rounded(evicted(context, few), *bits)
            yield f"{way}: {OWN}", rounded(merged(model, context, fewer, MERGES[OWN]), *bits)
        return
    for name, mask in masks(loaded, context, task).items():
        tried = REPORTED[name]
        if step == "screen":
            tried = EVEN if name == "h2o, even" else (*MERGES, "cam")
        if tried is None:
            continue
        yield f"{name}: evicted", evicted(context, mask)
        for way in tried:
            made = cam(model, context, mask, i) if way == "cam" else None
            yield f"{name}: {way}", made or merged(model, context, mask, MERGES[way])


def mixes(loaded: LoadedModel, context: Context, task: str) -> Iterator[tuple[str, Slots]]:
    """Single rules at the allowances of the heads, and the best rule of each head."""
    allowance = allowed(loaded, budgeted(loaded, task, "heads"))
    each = torch.stack([kept(scores(r, context, RECENT), allowance, RECENT) for r in RULES])
    for rule, mask in zip(RULES, each, strict=True):
        yield f"{rule} in every head", evicted(context, mask)
    for name, best in best_rules(task).items():
        mask = each.gather(0, best[None, ..., None].expand(1, *each.shape[1:]))[0]
        yield name, evicted(context, mask)


def best_rules(task: str) -> dict[str, torch.Tensor]:
    """The rule that loses least in each head `[L, H]`, by what was measured on which tasks."""
    lost = {}
    for file in sorted((HERE / "records").glob("heads-*.json")):
        rows = json.loads(file.read_text())
        each = torch.tensor([rows[k]["kl"] for k in rows if k.isdigit()])  # [contexts, L, H, rules]
        lost[file.stem.removeprefix("heads-")] = each.mean(0)
    every = sum(x / x.mean() for name, x in lost.items() if name in TASKS)
    found = {f"mixed, by {task}": lost[task]} if task in lost else {}
    found["mixed, by all tasks"] = every
    one = len(RULES) - 1  # without the second reading
    return {
        **{name: x.argmin(-1) for name, x in found.items()},
        **{f"{name}, one reading": x[..., :one].argmin(-1) for name, x in found.items()},
    }


def alone(
    loaded: LoadedModel, model: Plain, context: Context, item: Item, task: str
) -> list[list[list[float]]]:
    """KL divergence of answers where one head alone is cut by a rule `[L, H, rules]`, nats.

    It is 0 by every rule for heads without a choice, whose slots are sinks and the newest, or all.
    """
    asks = item.asks[:ASKS]
    allowance = allowed(loaded, budgeted(loaded, task, "heads"))
    each = torch.stack([kept(scores(r, context, RECENT), allowance, RECENT) for r in RULES])
    x = model.embedded(asks)[None]
    inputs = [x]
    for i in range(len(model.layers)):
        inputs.append(model.layer(i, inputs[-1], [context.full], context.size))
    right = model.answered(inputs[-1], asks, context.last)
    found = torch.zeros(*each.shape[1:3], len(RULES))
    for i in range(len(model.layers)):
        choice = [h for h in range(model.H) if (each[:, i, h] != each[0, i, h]).any()]
        caches = []
        for h, mask in ((h, mask) for h in choice for mask in each):
            bias = torch.zeros(mask.shape)
            bias[i, h] = bias[i, h].masked_fill(~mask[i, h], float("-inf"))
            caches.append(Slots(context.full.keys, context.full.values, bias))
        if not choice:
            continue
        x = model.layer(i, inputs[i].expand(len(caches), -1, -1, -1), caches, context.size)
        for j in range(i + 1, len(model.layers)):
            x = model.layer(j, x, [context.full], context.size)
        logs = model.answered(x, asks, context.last)
        kl = [(r.exp() * (r - log)).sum(-1).mean(-1) for r, log in zip(right, logs, strict=True)]
        found[i, choice] = torch.stack(kl).mean(0).view(len(choice), len(RULES))
    rows: list[list[list[float]]] = found.tolist()
    return [[[float(f"{x:.4g}") for x in head] for head in layer] for layer in rows]


def taken(model: Plain, item: Item, file: Path | None) -> Context:
    """A context that was taken in, from a file where it is there."""
    if file is not None and file.exists():
        found: Context = torch.load(file, weights_only=False)
        return found
    context = model.take_in(item.context.tolist(), again=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(context, file)
    return context


def run(
    step: str, task: str, loaded: LoadedModel, model: Plain, count: int, folder: Path | None
) -> None:
    """Measure the contexts of a task that the records lack."""
    split = "report" if step in ("merge", "sizes", "bits", "mix") else "search"
    some = prompts(loaded, task, count, split)
    file = HERE / "records" / f"{step}-{task}.json"
    rows: Rows = json.loads(file.read_text()) if file.exists() else {}
    if step != "heads" and task in TASKS and len(rows.get("empty", [])) < some.asks:
        found = answers(Evaluator(loaded), Policy(), bare(some, loaded), resident=False)
        rows["empty"] = [round(float(x), 4) for x in found.nll]
        write_atomic(file, json.dumps(rows) + "\n")
    for i, item in enumerate(some.items):
        if str(i) in rows:
            continue
        start = time.perf_counter()
        context = taken(model, item, folder and folder / f"{split}-{task}-{i}.pt")
        if step == "heads":
            rows[str(i)] = {"kl": alone(loaded, model, context, item, task)}
        else:
            named = list(ways(step, loaded, model, context, task, i))
            got = []
            for at in range(0, len(named), 8):
                caches = [slots for _, slots in named[at : at + 8]]
                got += list(scored(model.ask(context, caches, item.asks), item))
            rows[str(i)] = {n: pair for (n, _), pair in zip(named, got, strict=True)}
        write_atomic(file, json.dumps(rows) + "\n")
        print(step, task, i, f"{time.perf_counter() - start:.1f} s", flush=True)


def check(loaded: LoadedModel, model: Plain) -> None:
    """The harness against the package on a context: the full cache, and three policies."""
    task, found = "needle4", []
    some, evaluator = prompts(loaded, task, 1, "search"), Evaluator(loaded)
    slots = tokens_of(task) // PART
    zipped = Policy(
        slots=slots + 1, interval=1, sinks=4, recent_window=0, trigger="prompt",
        rule=Reread(instruction="repeat"), budgets=Budgets(kind="adakv", floor=0.0, across="model"),
    )  # fmt: skip
    snap = budgeted(loaded, task, "even", 32).model_copy(
        update={"rule": Attention(horizon=32, pool=5)}
    )
    theirs = {
        "full": Policy(name="full"), "snapkv-prompt": snap,
        "h2o, heads": budgeted(loaded, task, "heads"), "kvzip": zipped,
    }  # fmt: skip
    mine: dict[str, list[float]] = {name: [] for name in theirs}
    theirs["full, fp32"], mine["full, fp32"] = theirs["full"], []
    exact = Plain(loaded, torch.float32)
    for item in some.items:
        context = exact.take_in(item.context.tolist(), again=False)
        mine["full, fp32"] += next(scored(exact.ask(context, [context.full], item.asks), item))[0]
        context = model.take_in(item.context.tolist(), again=True)
        sets = masks(loaded, context, task)
        every = [
            context.full,
            evicted(context, kept(scores("snapkv", context, 32), slots, 32)),
            *(evicted(context, sets[name]) for name in ("h2o, heads", "kvzip")),
        ]
        rows = scored(model.ask(context, every, item.asks), item)
        for name, (nll, _) in zip(mine, rows, strict=False):
            mine[name] += nll
    for name, policy in theirs.items():
        native = torch.float32 if name == "full, fp32" else torch.float16
        nll = answers(evaluator, policy, some, resident=False, native=native).nll
        off = np.abs(nll - np.array(mine[name]))
        found.append({
            "policy": name, "asks": len(nll), "package": f"{nll.mean():.4f}",
            "harness": f"{np.mean(mine[name]):.4f}", "largest": f"{off.max():.4f}",
        })  # fmt: skip
        print(found[-1], flush=True)
    write_atomic(HERE / "records" / "check.json", json.dumps(found, indent=1) + "\n")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("step", choices=("check", "screen", "merge", "sizes", "bits", "heads", "mix"))
    ask.add_argument("tasks", nargs="*", metavar="TASK")
    ask.add_argument("--items", type=int, help="contexts")
    ask.add_argument("--contexts", type=Path, metavar="FOLDER")
    o = ask.parse_args()
    loaded = load_model()
    model, few = Plain(loaded), {"screen": 1, "heads": 3}
    with torch.inference_mode():
        if o.step == "check":
            check(loaded, model)
        for task in o.tasks or (*TASKS, "text"):
            if o.step != "check":
                run(o.step, task, loaded, model, o.items or few.get(o.step, 25), o.contexts)


if __name__ == "__main__":
    main()
