"""Whether a policy loses in a deployed cache what its evaluation says: NLL of every answer.

    python studies/2026-11-workloads/deployed.py TASK POLICY.json [--items 3] [--float64]

The cache takes in the context in one call, then every token of question and answer by itself.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from measure import TASKS

from kvsearch import Policy, PolicyCache
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.models.load import LoadedModel
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import Ask, Item, parse
from kvsearch.workloads.text import tokenize
from kvsearch.workloads.text.read import builtin


@torch.inference_mode()
def deployed(policy: Policy, loaded: LoadedModel, item: Item, ask: Ask) -> float:
    """Mean NLL of the answer's tokens, nats."""
    cache, losses = PolicyCache(policy, loaded.model), list[float]()
    last = loaded.model(torch.tensor(item.context)[None], past_key_values=cache).logits[0, -1]
    for i, token in enumerate([*ask.question, *ask.answer]):
        if i >= len(ask.question):
            losses.append(-last.double().log_softmax(-1)[token].item())
        last = loaded.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
    return float(np.mean(losses))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("task", choices=TASKS)
    ask.add_argument("policy", type=Path)
    ask.add_argument("--items", type=int, default=3)
    ask.add_argument("--float64", action="store_true")
    o = ask.parse_args()
    loaded, policy = load_model(), Policy.from_json(o.policy)
    if o.float64:
        loaded.model.double()
    tokens = tokenize(loaded.tokenizer, builtin())
    (prompts,) = from_tasks(
        loaded, [parse(TASKS[o.task])], tokens.ids, tokens.start, "agnostic", o.items, 0, "report"
    )
    evaluated = answers(Evaluator(loaded), policy, prompts, resident=False).nll
    found = np.array([deployed(policy, loaded, x, a) for x in prompts.items for a in x.asks])
    for one, other in zip(evaluated, found, strict=True):
        print(f"evaluated {one:.5f}  deployed {other:.5f}  difference {other - one:+.6f}")
    print(f"largest difference {np.abs(found - evaluated).max():.6f} nats")


if __name__ == "__main__":
    main()
