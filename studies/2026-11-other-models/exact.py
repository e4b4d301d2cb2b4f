"""Whether one pass equals a cache that is fed token by token, in float64, on a model with offsets.

    python exact.py MODEL.gguf TEXT [POLICY ...]

288 tokens, 60 slots; prints the largest difference of a token's NLL, and the mean difference.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvsearch.commands.heads import heads
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.options.budget import sized_for
from kvsearch.options.run_config import RunConfig
from kvsearch.policy_space import build
from kvsearch.session import key_offsets
from kvsearch.session.progress import Shown

sys.path.insert(0, str(Path(__file__).parent.parent / "2026-11-text-and-facts"))
from candidates import policies

TOKENS, SLOTS = 288, 60


def main() -> None:
    model, text, *names = sys.argv[1:]
    loaded = load_model(model, device="cpu")
    words = Path(text).read_text(encoding="utf-8")[500_000:503_000]
    ids = np.array(loaded.tokenizer(words)["input_ids"])[None, :TOKENS]
    config = RunConfig(model=model, context=TOKENS, budget_slots=SLOTS, bench=False)
    means, _ = key_offsets.known(loaded, Shown(quiet=True))
    setting = replace(
        sized_for(loaded.shape, config.budget(loaded.shape), TOKENS),
        heads=heads(loaded).losses, offset=means.offset(loaded.model, TOKENS),
    )  # fmt: skip
    exact = LoadedModel.of(loaded.model.double(), loaded.tokenizer)
    for name in names or ["h2o+k4v3+heads0.75"]:
        knobs = {"offset": key_offsets.WANTED, **policies()[name]}
        policy = build(knobs, setting, name=name)
        one = Evaluator(exact).quality(policy, ids).nll
        step, _ = stepwise(exact, policy, ids)
        gap = step - one[:, : step.shape[1]]
        print(name, f"largest {np.abs(gap).max():.1e}, mean {gap.mean():.1e}, of {gap.size} tokens")


if __name__ == "__main__":
    main()
