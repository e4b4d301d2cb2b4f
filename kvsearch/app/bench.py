"""`kvsearch bench`: decode speed of one policy."""

from kvsearch.app import inputs
from kvsearch.app.evaluate import EvalOptions, check_names, resolve
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError
from kvsearch.evaluate import throughput
from kvsearch.records import Throughput
from kvsearch.text import tokenize, windows


def run(
    shown: Shown,
    *,
    policy: str,
    model: str,
    dtype: str,
    device: str,
    batch: int,
    files: tuple[str, ...],
    dataset: str | None,
    budget: float | None,
    context: int,
    pairs: int,
    steps: int,
) -> tuple[str, Throughput]:
    """Time `policy`; returns its name and the measurement."""
    if context < 1 or pairs < 1 or steps < 1:
        raise KvsearchError("--context, --pairs and --steps must be at least 1")
    check_names(EvalOptions((policy,), budget=budget))
    need = throughput.needed(context, pairs, steps)
    loaded = inputs.model(model, dtype=dtype, device=device, context=need, say=shown.say)
    chosen = resolve((policy,), inputs.setting(loaded, budget, need))[0]
    tokens = tokenize(loaded.tokenizer, inputs.source(files, dataset, shown.say))
    ids = windows(tokens, count=1, length=need)[0]
    with shown.step("decode speed", pairs) as step:
        found = throughput.measure(
            loaded,
            chosen,
            ids,
            context=context,
            pairs=pairs,
            steps=steps,
            progress=lambda _: step.advance(),
        )
    return chosen.name or policy, found
