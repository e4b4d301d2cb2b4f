"""What a policy costs on prompts: against one plain forward pass, and ten asks against one.

    python studies/2026-11-workloads/cost.py

CPU seconds of one thread on three contexts of 640 tokens, medians of `PAIRS` turns in which all
take part one after the other. `plain` is the model without a cache over the same tokens (contexts,
question and answer); `ten` is ten asks of each context, of which `one` has the first.
"""

import csv
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kvsearch.app.heads import heads
from kvsearch.app.workloads import from_tasks
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.quality import Evaluator
from kvsearch.knobs import Setting, build
from kvsearch.models import load_model
from kvsearch.named_methods import METHODS
from kvsearch.policy_search.portfolio import DEFAULT, load
from kvsearch.text import tokenize
from kvsearch.text.sources import builtin
from kvsearch.workloads import parse

HERE = Path(__file__).parent
PAIRS, CONTEXTS, TOKENS, SLOTS = 3, 3, 640, 80
NAMED = ("streamingllm", "h2o", "snapkv-prompt", "h2o+int4-fine", "kvzip")


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    torch.set_num_threads(1)
    loaded = load_model()
    evaluator, losses = Evaluator(loaded), heads(loaded).losses
    text = tokenize(loaded.tokenizer, builtin())
    one, ten = (
        from_tasks(
            loaded, [parse(f"needle:10,asks={asks},tokens={TOKENS}")], text.ids, text.start,
            "agnostic", CONTEXTS, 0, "report",
        )[0]
        for asks in (1, 10)
    )  # fmt: skip
    size = loaded.shape.budget_bytes(SLOTS)
    setting = Setting(loaded.shape, size, ten.longest, ten.prompt, heads=losses)
    points = {n: dict(p.knobs) for n, p in load(DEFAULT, prompted=True).items()}
    known = {n: dict(METHODS[n].knobs) for n in NAMED} | {n: points[n] for n in ("earlier-4",)}
    policies = {name: build(knobs, setting, name=name) for name, knobs in known.items()}
    whole = [
        torch.tensor([[*item.context, *item.asks[0].question, *item.asks[0].answer]])
        for item in one.items
    ]

    @torch.inference_mode()
    def plain() -> None:
        for ids in whole:
            loaded.model(ids, use_cache=False, logits_to_keep=8)  # as many as answers have

    seen: dict[tuple[str, str], list[float]] = {}
    for _ in range(PAIRS):
        base = cpu(plain)
        for name, policy in policies.items():
            few, many = (
                cpu(partial(answers, evaluator, policy, asked, resident=False))
                for asked in (one, ten)
            )
            seen.setdefault((name, "one"), []).append(few / base)
            seen.setdefault((name, "ten"), []).append(many / few)
    with open(HERE / "cost.csv", "w", newline="") as f:
        rows = csv.writer(f, lineterminator="\n")
        rows.writerow(("policy", "one_to_plain", "ten_to_one", "pairs"))
        for name in policies:
            ratios = (statistics.median(seen[name, kind]) for kind in ("one", "ten"))
            rows.writerow((name, *(f"{r:.2f}" for r in ratios), PAIRS))


if __name__ == "__main__":
    main()
