"""What a policy costs on prompts: against one plain forward pass, and ten asks against one.

    python studies/2026-11-workloads/cost.py            # writes cost.csv
    python studies/2026-11-workloads/cost.py --rules    # writes rules.csv; --only RULE adds a row

CPU seconds of one thread on three contexts of 640 tokens, medians of `PAIRS` turns in which all
take part one after the other. `plain` is the model without a cache over the same tokens (contexts,
question and answer); `ten` is ten asks of each context, of which `one` has the first.
`rules.csv` has a row for every rule that ranks tokens: its first method with 80 slots in 16 bits,
evicting every 32 tokens (KVzip: after the prompt), paired with a plain pass context by context, and
the bytes of statistics per sequence, scores and windows of attention, that the budget pays for.
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from kvsearch.commands.heads import heads
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.models.learned import Learned, sample_of
from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_space import Setting, Value, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.portfolio import load
from kvsearch.rules import KVzap
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import Prompts, parse
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin

HERE = Path(__file__).parent
LEARNED = HERE.parent / "2026-11-head-prices" / "learned.yaml"
PAIRS, CONTEXTS, TOKENS, SLOTS, EVERY = 3, 3, 640, 80, 32
DEAR = {"expected-attention": 4 * SLOTS}  # its covariances alone take more than SLOTS
NEAR = 3  # rules that are compared with the same plain pass before them
NAMED = ("streamingllm", "h2o", "snapkv-prompt", "h2o+int4-fine", "kvzip")
RULES = {"kvzip": "kvzip"}  # rule of the space -> its first method that evicts in 16 bits
for _name, _method in METHODS.items():
    if not {"tiers", "trigger"} & {*_method.knobs} and "rule" in _method.knobs:
        RULES.setdefault(str(_method.knobs["rule"]), _name)


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


class Measured:
    """The model, what it is asked, and how long it takes without a policy."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.loaded = load_model()
        self.evaluator, self.losses = Evaluator(self.loaded), heads(self.loaded).losses
        text = tokenize(self.loaded.tokenizer, builtin())
        self.one, self.ten = (
            from_tasks(
                self.loaded, [parse(f"needle:10,asks={asks},tokens={TOKENS}")], text.ids,
                text.start, "agnostic", CONTEXTS, 0, "report",
            )[0]
            for asks in (1, 10)
        )  # fmt: skip
        self.learned = self.weights()

    def weights(self) -> str:
        """SHA-256 of weights of rule kvzap; they cost what others do, and are in no disk cache."""
        shape, hidden = self.loaded.shape, self.loaded.model.config.hidden_size
        size, draw = (shape.layers, shape.kv_heads), torch.Generator().manual_seed(0)
        weight, bias = torch.randn(*size, hidden, generator=draw), torch.zeros(size)
        data = Learned(weight, bias, sample_of(self.loaded.model), self.loaded.name).encoded()
        self.folder = tempfile.TemporaryDirectory()
        rule = KVzap(weights=sha256(data).hexdigest())
        (Path(self.folder.name) / rule.files[0]).write_bytes(data)
        rule.lies_in(Path(self.folder.name))
        return str(rule.weights)

    def policy(self, name: str, knobs: Mapping[str, Value], slots: int = SLOTS) -> Policy:
        """A method with the bytes of so many slots in 16 bits."""
        shape, ten = self.loaded.shape, self.ten
        size, more = shape.budget_bytes(slots), dict(heads=self.losses, learned=self.learned)
        setting = Setting(shape, size, ten.longest, prompt=ten.prompt, **more)
        return build(dict(knobs), setting, name=name)

    @torch.inference_mode()
    def plain(self, asked: Prompts) -> None:
        """One pass of the model without a cache."""
        for item in asked.items:
            ask = item.asks[0]
            ids = torch.tensor([[*item.context, *ask.question, *ask.answer]])
            self.loaded.model(ids, use_cache=False, logits_to_keep=8)  # as many as answers have

    def seconds(self, policy: Policy, asked: Prompts) -> float:
        """CPU seconds of an evaluation."""
        return cpu(partial(answers, self.evaluator, policy, asked, resident=False))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rules", action="store_true", help="a row a rule instead")
    arguments.add_argument("--only", action="append", default=[], metavar="RULE", choices=RULES)
    given = arguments.parse_args()
    measured = Measured()
    if given.rules or given.only:
        rules(measured, given.only or RULES)
    else:
        policies(measured)


def policies(measured: Measured) -> None:
    """`cost.csv`."""
    points = {n: dict(p.knobs) for n, p in load(str(LEARNED)).items()}
    known = {n: dict(METHODS[n].knobs) for n in NAMED} | {n: points[n] for n in ("earlier-4",)}
    seen: dict[tuple[str, str], list[float]] = {}
    for _ in range(PAIRS):
        base = cpu(partial(measured.plain, measured.one))
        for name, knobs in known.items():
            policy = measured.policy(name, knobs)
            few, many = (measured.seconds(policy, x) for x in (measured.one, measured.ten))
            seen.setdefault((name, "one"), []).append(few / base)
            seen.setdefault((name, "ten"), []).append(many / few)
    rows = [
        {
            "policy": name,
            "one_to_plain": f"{statistics.median(seen[name, 'one']):.2f}",
            "ten_to_one": f"{statistics.median(seen[name, 'ten']):.2f}",
            "pairs": PAIRS,
        }
        for name in known
    ]
    write(HERE / "cost.csv", rows)


def rules(measured: Measured, names: Sequence[str]) -> None:
    """`rules.csv`; rules that are not asked for keep their rows."""
    file = HERE / "rules.csv"
    known = {r["rule"]: r for r in csv.DictReader(file.open())} if file.exists() else {}
    policies: dict[str, Policy] = {}
    for name in names:
        knobs = dict(METHODS[RULES[name]].knobs)
        every = {} if "trigger" in knobs else {"interval": EVERY}
        policies[name] = measured.policy(RULES[name], {**knobs, **every}, DEAR.get(name, SLOTS))
    ratios: dict[str, list[float]] = {name: [] for name in names}
    for item in measured.one.items:  # the first compiles loops, which a median leaves out
        asked, base = replace(measured.one, items=(item,)), 0.0
        for i, (name, policy) in enumerate(policies.items()):
            base = base if i % NEAR else cpu(partial(measured.plain, asked))
            ratios[name].append(measured.seconds(policy, asked) / base)
            known[name] = {
                "rule": name,
                "method": RULES[name],
                "slots": policy.slots,
                "trigger": policy.trigger,
                "window": getattr(policy.rule, "horizon", None) or "",
                "recent_window": policy.recent_window,
                "to_plain": f"{statistics.median(ratios[name]):.2f}",
                "lowest": f"{min(ratios[name]):.2f}",
                "highest": f"{max(ratios[name]):.2f}",
                "pairs": len(ratios[name]),
                "bytes_statistics": statistics_of(policy, measured.loaded.shape),
            }
            print(", ".join(map(str, known[name].values())), flush=True)
            write(file, [known[n] for n in RULES if n in known])


def statistics_of(policy: Policy, shape: ModelShape) -> int:
    """Bytes of scores and windows of attention per sequence, as the budget pays for them."""
    rule, H = policy.active_rule, shape.kv_heads
    assert rule is not None and policy.slots is not None
    slots = policy.slots * rule.voters(H) * rule.slot_bytes(policy.interval)
    return shape.layers * (slots + rule.layer_bytes(shape.heads, H, shape.head_dim))


def write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    with file.open("w", newline="") as f:
        out = csv.DictWriter(f, rows[0], lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


if __name__ == "__main__":
    main()
