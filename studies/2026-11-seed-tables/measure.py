"""What the tables of LaCache and XMU come to on a small model.

    python studies/2026-11-seed-tables/measure.py PART ... --wikitext wikitext2-test.raw
        [--openbookqa openbookqa-test.jsonl] [--model MODEL --name NAME] [--at 0.1 0.4]

Parts, in the order in which they are named: `ladder` (LaCache's Table 1: full cache, StreamingLLM
and LaCache at fixed slots), `ablation` (spans and overlaps), `long` (one window of 8192 tokens),
`tiers` (XMU's Table 2), `curve` (its Figure 4: H2O beside XMU's score, both without tiers),
`needles` and `questions` (OpenBookQA). Every token of a window is scored, as in the papers. Rows go
to records/PART-NAME.jsonl at once; those that are there are kept.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsearch.cache import PolicyCache
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.replay import deployed
from kvsearch.models import load_model
from kvsearch.policy import Ladder, ModelShape, Policy, layout
from kvsearch.policy.ladder import rungs
from kvsearch.policy_space import Setting, Value
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.sizing import DEFAULTS
from kvsearch.policy_space.to_policy import policy_of
from kvsearch.session.context_worth import bare
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import parse
from kvsearch.workloads.text import read_file, tokenize, windows
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
REPORT = "900000-1290547"  # bytes of the report part of WikiText-2
BLOCK = 128  # tokens of a sum in the records
FULL = Policy(name="full")
BUDGETS = (256, 128, 512)  # slots
LADDERS = ("lacache", "lacache-contiguous", "lacache-half")
ABLATED, SPANS, OVERLAPS = 256, (0.125, 0.25, 0.5), (0.0, 0.25, 0.5)
RATIOS = {"0.1": "0.1", "0.4": "0.4", "0.2": "0.2", "0.8": "0.8", "0.6": "0.6-fixed"}
INTERVAL = 8  # tokens between two rankings of the tiers; the papers' tables imply every token
NEEDLE, ITEMS, NEEDLE_SINKS = "needle,tokens=1000", 10, 64
SHOTS, ASKED, ASKED_AT = 5, 60, ("0.1", "0.4", "0.8")


@dataclass(frozen=True)
class Cell:
    """A row to measure on text: at so many slots or this ratio, on windows of so many tokens."""

    at: str
    name: str
    policy: Policy
    windows: int
    tokens: int


class Records:
    """JSON lines; a row that is there is not measured again."""

    def __init__(self, part: str, model: str) -> None:
        self.file = HERE / "records" / f"{part}-{model}.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.keys = {tuple(json.loads(line)["key"]) for line in lines}

    def add(self, key: tuple[str, ...], **row: object) -> None:
        """One row, written at once."""
        self.keys.add(key)
        self.file.parent.mkdir(exist_ok=True)
        with open(self.file, "a", newline="\n") as f:
            f.write(json.dumps({"key": key, **row}) + "\n")
        print(self.file.stem, *key, flush=True)


def made(knobs: Mapping[str, Value], shape: ModelShape, slots: int | None, name: str) -> Policy:
    """The policy of these knobs with exactly so many slots, whatever they weigh."""
    return policy_of(DEFAULTS | dict(knobs), Setting(shape, None, 0), slots, name)


def method(name: str, shape: ModelShape, slots: int | None = None, **more: Value) -> Policy:
    """A published method with exactly so many slots."""
    return made({**METHODS[name].knobs, **more}, shape, slots, name)


def laddered(policy: Policy, shape: ModelShape) -> Policy:
    """Sized as LaCache is: half of what a ladder frees is added, so that `slots` is the mean."""
    assert policy.ladder is not None and policy.slots is not None
    freed = rungs(shape.layers, policy.ladder.span, policy.ladder.overlap).R
    return policy.model_copy(update={"slots": policy.slots + freed // 2})


def ladder(shape: ModelShape, count: int) -> Iterator[Cell]:
    """LaCache's Table 1."""
    yield Cell("0", "full", FULL, count, 2048)
    for wanted in (LADDERS[:1], LADDERS[1:]):  # what the paper compares comes first
        for slots in BUDGETS:
            if wanted == LADDERS[:1]:
                one = method("streamingllm", shape, slots)
                yield Cell(str(slots), "streamingllm", one, count, 2048)
            for name in wanted:
                one = laddered(method(name, shape, slots), shape)
                yield Cell(str(slots), name, one, count, 2048)


def ablation(shape: ModelShape, count: int) -> Iterator[Cell]:
    """Spans and overlaps of the ladder; those of two methods are in `ladder`."""
    base = method("lacache", shape, ABLATED)
    for span in SPANS:
        for overlap in OVERLAPS:
            if (span, overlap) in ((0.25, 0.5), (0.5, 0.0)):
                continue
            one = base.model_copy(update={"ladder": Ladder(span=span, overlap=overlap)})
            name = f"span {span:g}, overlap {overlap:g}"
            yield Cell(str(ABLATED), name, laddered(one, shape), min(3, count), 2048)


def long(shape: ModelShape, count: int) -> Iterator[Cell]:
    """One window of 8192 tokens."""
    yield Cell("0", "full", FULL, 1, 8192)
    for slots in BUDGETS[::2]:
        yield Cell(str(slots), "streamingllm", method("streamingllm", shape, slots), 1, 8192)
        yield Cell(str(slots), "lacache", laddered(method("lacache", shape, slots), shape), 1, 8192)


def tiers(shape: ModelShape, count: int) -> Iterator[Cell]:
    """XMU's Table 2; nothing is evicted but without quantisation dropout."""
    yield Cell("0", "full", FULL, min(3, count), 1024)
    for ratio, row in RATIOS.items():
        for name, policy in table2(shape, ratio, row, 1024).items():
            yield Cell(ratio, name, policy, min(3, count), 1024)
    printed = table2(shape, "0.6", "0.6-printed", 1024)
    for name in ("whole", "uncorrected"):
        yield Cell("0.6", f"{name}, as printed", printed[name], min(3, count), 1024)
    one = method("xmu-0.1", shape)
    yield Cell("0.1", f"whole, every {one.interval} tokens", one, min(3, count), 1024)


def table2(shape: ModelShape, ratio: str, row: str, tokens: int) -> dict[str, Policy]:
    """Three columns of XMU's Table 2 at one ratio, for so many tokens."""
    slots = round(float(ratio) * tokens)
    return {
        "whole": method(f"xmu-{row}", shape, interval=INTERVAL),
        "uncorrected": method(f"xmu-{row}", shape, interval=INTERVAL, rule="h2o"),
        "evicted": method("xmu-evict", shape, slots),
    }


def curve(shape: ModelShape, count: int) -> Iterator[Cell]:
    """XMU's Figure 4: H2O, and its score without a recent window, as XMU has none."""
    for ratio in RATIOS:
        slots = round(float(ratio) * 1024)
        yield Cell(ratio, "h2o", method("h2o", shape, slots), min(3, count), 1024)
        alone = method("h2o", shape, slots, recent_window=1)
        yield Cell(ratio, "h2o, no recent window", alone, min(3, count), 1024)


TEXT = {"ladder": ladder, "ablation": ablation, "long": long, "tiers": tiers, "curve": curve}


def on_text(part: str, evaluator: Evaluator, o: argparse.Namespace) -> None:
    """Sums of NLL over blocks of every window, and bytes over a window."""
    records, shape = Records(part, o.name), evaluator.loaded.shape
    text = tokenize(evaluator.loaded.tokenizer, read_file(f"{o.wikitext}:{REPORT}"))
    for cell in TEXT[part](shape, o.windows):
        if (cell.at, cell.name) in records.keys or not wanted(o, cell.at, cell.name):
            continue
        stretches = 4 if cell.tokens == 2048 else 3 if cell.tokens == 1024 else 1
        ids = windows(text, count=stretches, length=cell.tokens)[: cell.windows]
        found = evaluator.quality(cell.policy, ids, resident=False)
        nll, sizes = found.nll.astype(np.float64), layout(cell.policy, shape)
        sums = np.add.reduceat(nll, np.arange(0, nll.shape[1], BLOCK), axis=1)
        records.add(
            (cell.at, cell.name),
            tokens=nll.shape[1],
            slots=cell.policy.slots,
            slots_mean=round(sizes.bytes_mean(cell.tokens) / shape.budget_bytes(1), 1),
            slots_peak=round(sizes.bytes_peak(cell.tokens) / shape.budget_bytes(1), 1),
            seconds=round(found.seconds, 1),
            sums=[[round(float(x), 3) for x in window] for window in sums],
        )


def wanted(o: argparse.Namespace, at: str, name: str) -> bool:
    """Whether a row was asked for; the full cache always is."""
    return at == "0" or ((not o.at or at in o.at) and (not o.only or name in o.only))


def needles(evaluator: Evaluator, o: argparse.Namespace) -> None:
    """A fact in 1000 tokens of the built-in prose; half of the prompt is kept once it is read."""
    records, loaded = Records("needles", o.name), evaluator.loaded
    prose = tokenize(loaded.tokenizer, builtin())
    for see in ("agnostic", "aware"):
        (prompts,) = from_tasks(
            loaded, [parse(NEEDLE)], prose.ids, prose.start, see, ITEMS, 0, "report"
        )  # fmt: skip
        depths = [item.depth for item in prompts.items]
        slots = round(np.mean([next(item.paths(see))[0] for item in prompts.items]) / 2)
        rows = {}
        if see == "agnostic":  # both are the same with the full cache
            rows |= {"empty": FULL, "full": FULL}
        for name, base in (("lacache", "lacache-half"), ("streamingllm", "streamingllm")):
            more: dict[str, Value] = dict(trigger="prompt", sinks=NEEDLE_SINKS)
            one = method(base, loaded.shape, slots, **more)
            rows[name] = laddered(one, loaded.shape) if one.ladder else one
        for name, policy in rows.items():
            if (see, name) in records.keys or (o.see and see not in o.see):
                continue
            some = bare(prompts, loaded) if name == "empty" else prompts
            found = answers(evaluator, policy, some, resident=False)
            records.add(
                (see, name),
                slots=policy.slots,
                depths=[round(float(x or 0), 3) for x in depths],
                nll=[round(float(x), 4) for x in found.nll],
                exact=[int(x) for x in found.exact],
                seconds=round(found.seconds, 1),
            )


def questions(evaluator: Evaluator, o: argparse.Namespace) -> None:
    """OpenBookQA behind five demonstrations: log-probabilities of the four answers, in nats."""
    records, loaded = Records("questions", o.name), evaluator.loaded
    items = [json.loads(line) for line in o.openbookqa.read_text().splitlines()]
    encode, asked = loaded.tokenizer.encode, items[SHOTS : SHOTS + ASKED]
    start = list[int]()
    for item in items[:SHOTS]:
        start += encode(f"{item['question_stem']} {item['choices']['text'][right(item)]}.\n\n")
    stems = [encode(item["question_stem"]) for item in asked]
    choices = [[encode(f" {text}") for text in item["choices"]["text"]] for item in asked]
    longest = [
        len(start) + len(stem) + max(map(len, four))
        for stem, four in zip(stems, choices, strict=True)
    ]
    tokens = round(float(np.mean(longest)))
    if ("0", "questions") not in records.keys:
        records.add(
            ("0", "questions"),
            right=[right(item) for item in asked],
            characters=[[len(text) for text in item["choices"]["text"]] for item in asked],
            demonstrations=len(start),
            tokens=tokens,
        )
    rows = {("0", "full"): FULL}
    for ratio, row in RATIOS.items():
        if ratio in ASKED_AT:
            rows |= {(ratio, n): p for n, p in table2(loaded.shape, ratio, row, tokens).items()}
    for key, policy in rows.items():
        if key in records.keys or not wanted(o, *key):
            continue
        sizes, logs = layout(policy, loaded.shape), []
        with torch.inference_mode():
            shown = deployed(loaded, policy, packed=False)
            evaluator.head.hidden(torch.tensor([start]), shown)
            for stem, four in zip(stems, choices, strict=True):
                logs.append([round(x, 3) for x in scores(evaluator, shown.fork(), stem, four)])
        held = np.mean([sizes.bytes_at(n) for n in longest]) / loaded.shape.budget_bytes(1)
        records.add(key, slots=policy.slots, slots_end=round(float(held), 1), logprobs=logs)


def right(item: Mapping[str, Any]) -> int:
    """Which answer is right."""
    return int(item["choices"]["label"].index(item["answerKey"]))


def scores(
    evaluator: Evaluator, cache: PolicyCache, stem: list[int], four: list[list[int]]
) -> list[float]:
    """Log-probabilities of answers behind a question, which the cache takes in; in one batch."""
    last = evaluator.head.hidden(torch.tensor([stem]), cache)[:, -1:]
    most, hidden = max(map(len, four)), last.expand(len(four), -1, -1)
    if most > 1:
        cache.batch_repeat_interleave(len(four))
        rows = [answer[:-1] + [0] * (most - len(answer)) for answer in four]  # nobody sees the 0s
        hidden = torch.cat([hidden, evaluator.head.hidden(torch.tensor(rows), cache)], 1)
    log = evaluator.head.logits(hidden).log_softmax(-1)
    return [
        float(log[i, : len(answer)].gather(-1, torch.tensor(answer)[:, None]).sum())
        for i, answer in enumerate(four)
    ]


def main() -> None:
    torch.set_num_threads(1)
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("parts", nargs="+", choices=(*TEXT, "needles", "questions"))
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--openbookqa", type=Path)
    ask.add_argument("--model", default="smollm2-135m")
    ask.add_argument("--name", default="smollm2-135m", help="of the model, in the records")
    ask.add_argument("--at", nargs="*", default=[], help="slots or ratios; all by default")
    ask.add_argument("--only", nargs="*", default=[], help="policies; all by default")
    ask.add_argument("--see", nargs="*", default=[], help="agnostic or aware; both by default")
    ask.add_argument("--windows", type=int, default=4, help="of 2048 tokens; 3 of 1024 at most")
    o = ask.parse_args()
    evaluator = Evaluator(load_model(o.model))
    for part in o.parts:
        if part in TEXT:
            on_text(part, evaluator, o)
        else:
            {"needles": needles, "questions": questions}[part](evaluator, o)


if __name__ == "__main__":
    main()
