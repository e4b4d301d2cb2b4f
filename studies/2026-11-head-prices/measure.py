"""What the portfolio loses when its head budgets follow one measurement or another.

    python measure.py text --wikitext wikitext2-test.raw --sotu sotu.txt [--model gemma.gguf]
    python measure.py controls --wikitext FILE --sotu FILE
    python measure.py needles --wikitext FILE --sotu FILE

`text`: the points of the portfolio as it is, with the losses of `kvsearch heads`, and those of the
portfolio before (`before.yaml`) with losses estimated on 512 tokens of the search text, on four
windows of 1536 tokens of the report part of six texts. `controls`: the first point with even
budgets, AdaKV, budgets per layer, and losses measured on other texts, on two windows of three
(`other_measurements.py`). `needles`: facts in prose, one asked after the context. Records that are
there are kept.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from other_measurements import KINDS, on_text

from kvsearch.commands.heads import heads
from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.replay import deployed
from kvsearch.models import load_model
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import HeadLosses, Policy
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.portfolio import load
from kvsearch.session.make_windows import text
from kvsearch.workloads.text import read_file, tokenize

HERE = Path(__file__).parent
CONTEXT, WINDOWS = 1536, 4
BUDGETS = (128, 64, 256)
CELLS = [(tokens, p, facts) for tokens in (640, 1000) for p in (4, 8, 16) for facts in (1, 4)]
NEEDLES, TOGETHER = 50, 10
PUBLISHED = ("h2o", "snapkv")
WORDS = (
    "otter lantern violet copper meadow falcon granite cedar marble thunder willow amber".split()
)
PLACES = "museum station library garden market castle school theatre bakery airport".split()
Knobs = dict[str, object]


class Records:
    """JSON lines; a row that is there is not measured again."""

    def __init__(self, name: str) -> None:
        self.file = HERE / "records" / f"{name}.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.keys = {tuple(json.loads(line)["key"]) for line in lines}

    def add(self, key: tuple[object, ...], **row: object) -> None:
        """One row, written at once."""
        self.keys.add(key)
        with open(self.file, "a", newline="\n") as f:
            f.write(json.dumps({"key": key, **row}) + "\n")
        print(*key, flush=True)


def points() -> dict[str, tuple[str, Knobs]]:
    """Name -> which losses its head budgets follow, and its knobs."""
    known = load(str(HERE / "learned.yaml"))
    now = {f"now-{n[-1]}": ("recall", dict(m.knobs)) for n, m in known.items()}
    past = load(str(HERE / "before.yaml"))
    return {**now, **{f"before-{n[-1]}": ("text", dict(m.knobs)) for n, m in past.items()}}


def texts(wikitext: Path, sotu: Path) -> dict[str, tuple[str, ...]]:
    """The six texts of `studies/2026-11-first-command`."""
    sys.path.insert(0, str(HERE.parent / "2026-11-first-command"))
    from measure import texts as six

    return {name: tuple(options[1:]) for name, options in six(wikitext, sotu).items()}


def built(knobs: Knobs, evaluator: Evaluator, slots: int, T: int, of: HeadLosses) -> Policy:
    """The policy of these knobs in the bytes of so many fp16 slots."""
    shape = evaluator.loaded.shape
    return build(knobs, Setting(shape, shape.budget_bytes(slots), T, heads=of))


class OneWindow(RunConfig):
    """One search window, and those beside it that a longer search has."""

    grows = True


def measure_text(o: argparse.Namespace, evaluator: Evaluator) -> None:
    """The portfolio now and before, on four windows of each report text."""
    records, recall = Records(f"text-{o.name}"), heads(evaluator.loaded).losses
    for name, files in texts(o.wikitext, o.sotu).items():
        if o.texts and name not in o.texts:
            continue
        given = OneWindow(text=files, windows=1, report_windows=WINDOWS)
        parts = text(evaluator.loaded, given, lambda _: None).windows
        plain = on_text(evaluator, parts["sensitivity"][0, :512])
        report = parts["report"][:WINDOWS]
        rows: dict[tuple[object, ...], Policy] = {(name, 0, "full"): Policy(name="full")}
        for slots in o.budgets:
            others = {n: ("recall", dict(METHODS[n].knobs)) for n in ("h2o", "h2o+int4-fine")}
            for point, (of, knobs) in {**points(), **others}.items():
                if (o.only and point not in o.only) or (name, slots, point) in records.keys:
                    continue
                losses = recall if of == "recall" else plain
                try:
                    rows[name, slots, point] = built(knobs, evaluator, slots, CONTEXT, losses)
                except PolicyError as e:
                    print(name, slots, point, e)
        for key, policy in rows.items():
            if key not in records.keys:
                add_nll(records, key, evaluator, policy, report)


def add_nll(
    records: Records, key: tuple[object, ...], evaluator: Evaluator, policy: Policy, ids: np.ndarray
) -> None:
    """Sums of NLL after 64, 128 and 256 tokens, of every window."""
    nll = evaluator.quality(policy, ids, resident=False).nll.astype(np.float64)
    sums = {n: [round(float(x), 3) for x in nll[:, n - 1 :].sum(1)] for n in sorted(BUDGETS)}
    records.add(key, sums=sums, tokens={n: nll.shape[1] - n + 1 for n in sorted(BUDGETS)})


def measure_controls(o: argparse.Namespace, evaluator: Evaluator) -> None:
    """The first point with budgets of other kinds and from other measurements."""
    records, recall = Records(f"controls-{o.name}"), heads(evaluator.loaded).losses
    knobs = points()["now-1"][1]
    for name in ("built-in", "wikitext-3", "sotu-2"):
        files = texts(o.wikitext, o.sotu)[name]
        given = OneWindow(text=files, windows=1, report_windows=2)
        parts = text(evaluator.loaded, given, lambda _: None).windows
        aside, ids = parts["sensitivity"][0], parts["report"][:2]
        others = {
            "recall": knobs,
            "even": {**knobs, "budgets": "uniform"},
            "adakv": {**knobs, "budgets": "adakv"},
            "layers": {**knobs, "budgets": "sensitivity"},
            "marginal": {**knobs, "budgets": "marginal"},
        }
        for kind, how in {**others, **dict.fromkeys(KINDS, knobs)}.items():
            key = (name, 128, kind)
            if key not in records.keys and (not o.only or kind in o.only):
                losses = KINDS[kind](evaluator, aside) if kind in KINDS else recall
                policy = built(how, evaluator, 128, CONTEXT, losses)
                add_nll(records, key, evaluator, policy, ids)
        if (name, 0, "full") not in records.keys:
            add_nll(records, (name, 0, "full"), evaluator, Policy(name="full"), ids)


@dataclass(frozen=True)
class Asked:
    """A context with facts, a question after it, and the answer, as token ids."""

    context: list[int]
    question: list[int]
    answer: list[int]


def asked(tokenizer: object, prose: np.ndarray, tokens: int, facts: int) -> Iterator[Asked]:
    """Contexts of so many tokens; each fact is a number of seven digits."""
    rng = random.Random(f"{tokens}/{facts}")

    def ids(words: str) -> list[int]:
        found: list[int] = tokenizer(words, add_special_tokens=False).input_ids  # type: ignore
        return found

    while True:
        names = rng.sample([f"{w} {p}" for w in WORDS for p in PLACES], facts)
        known = [
            (f"The special number of the {n} is", f" {rng.randrange(10**6, 10**7)}") for n in names
        ]
        said = [ids(f"\n{what}{number}.\n") for what, number in known]
        room = tokens - sum(map(len, said))
        begin = rng.randrange(len(prose) - room)
        body, at = prose[begin : begin + room].tolist(), 0
        context: list[int] = []
        cuts = sorted(rng.sample(range(room // 20, room * 9 // 10), facts))
        for fact, cut in zip(said, cuts, strict=True):
            context += [*body[at:cut], *fact]
            at = cut
        one = rng.randrange(facts)
        what, number = known[one]
        question = f"\nQuestion: what is the special number of the {names[one]}? Answer: {what}"
        yield Asked(context + body[at:], ids(question), ids(number))


@torch.inference_mode()
def answers(evaluator: Evaluator, policy: Policy, items: list[Asked]) -> list[tuple[float, bool]]:
    """NLL of each answer, and whether greedy decoding would give it."""
    found: dict[int, tuple[float, bool]] = {}
    shapes: dict[tuple[int, int], list[int]] = {}
    for i, x in enumerate(items):
        size = len(x.context) + len(x.question) + len(x.answer)
        shapes.setdefault((size, len(x.answer)), []).append(i)
    for (_, last), which in shapes.items():
        for start in range(0, len(which), TOGETHER):
            mine = which[start : start + TOGETHER]
            rows = [[*items[i].context, *items[i].question, *items[i].answer] for i in mine]
            ids = torch.tensor(rows)
            cache = deployed(evaluator.loaded, policy, packed=False)
            hidden = evaluator.head.hidden(ids, cache)[:, -last - 1 : -1]
            log = evaluator.head.logits(hidden).log_softmax(-1)
            target = ids[:, -last:]
            lost = -log.gather(-1, target[..., None])[..., 0].mean(-1)
            right = (log.argmax(-1) == target).all(-1)
            for i, nll, exact in zip(mine, lost.tolist(), right.tolist(), strict=True):
                found[i] = round(nll, 4), exact
    return [found[i] for i in range(len(items))]


def measure_needles(o: argparse.Namespace, evaluator: Evaluator) -> None:
    """Facts in prose of a text that no measurement of heads saw."""
    records, recall = Records(f"needles-{o.name}"), heads(evaluator.loaded).losses
    loaded = evaluator.loaded
    prose = tokenize(loaded.tokenizer, read_file(f"{o.wikitext}:900000-")).ids.astype(np.int64)
    aside = tokenize(loaded.tokenizer, read_file(f"{o.wikitext}:0-100000")).ids.astype(np.int64)
    plain = on_text(evaluator, aside[:512])
    for tokens, part, facts in CELLS:
        if o.cells and f"{tokens}/{part}/{facts}" not in o.cells:
            continue
        source = asked(loaded.tokenizer, prose, tokens, facts)
        items = [next(source) for _ in range(o.needles)]
        rows: dict[str, Policy] = {"full": Policy(name="full")} if part < 16 else {}
        T, slots = tokens + 64, tokens // part
        published = {n: ("text", dict(METHODS[n].knobs)) for n in PUBLISHED}
        for point, (of, knobs) in {**published, **points()}.items():
            try:
                rows[point] = built(knobs, evaluator, slots, T, recall if of == "recall" else plain)
            except PolicyError as e:
                print(tokens, part, facts, point, e)
        for kind in o.heads:
            how = points()[o.point][1]
            rows[f"{o.point}, {kind}"] = built(
                how, evaluator, slots, T, KINDS[kind](evaluator, aside)
            )
        if o.heads:
            even = {**points()[o.point][1], "budgets": "uniform"}
            rows[f"{o.point}, even"] = built(even, evaluator, slots, T, recall)
        for name, policy in rows.items():
            key = (tokens, part, facts, name)
            if key not in records.keys and (not o.only or name in o.only or "," in name):
                found = answers(evaluator, policy, items)
                records.add(key, nll=[x for x, _ in found], exact=[int(x) for _, x in found])


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("what", choices=("text", "controls", "needles"))
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--model", default="smollm2-135m")
    ask.add_argument("--name", default="smollm2-135m", help="of the model, in the records")
    ask.add_argument("--only", nargs="*", default=[], help="points or policies")
    ask.add_argument("--texts", nargs="*", default=[], help="of `text`: some of the six")
    ask.add_argument("--needles", type=int, default=NEEDLES, help="contexts of a cell")
    ask.add_argument("--cells", nargs="*", default=[], help="of `needles`: such as 640/8/1")
    ask.add_argument("--budgets", nargs="*", type=int, default=BUDGETS, help="of `text`: slots")
    ask.add_argument("--point", default="now-4", help="that --heads measures")
    ask.add_argument(
        "--heads",
        nargs="*",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help="of `needles`: heads of the first point for prompts measured otherwise",
    )
    o = ask.parse_args()
    evaluator = Evaluator(load_model(o.model))
    {"text": measure_text, "controls": measure_controls, "needles": measure_needles}[o.what](
        o, evaluator
    )


if __name__ == "__main__":
    main()
