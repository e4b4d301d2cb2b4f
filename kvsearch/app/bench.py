"""`kvsearch bench`: decode speed of one policy."""

from pathlib import Path

from kvsearch.app import heads as of_heads
from kvsearch.app import inputs
from kvsearch.app.budget import check_budget, in_both_units, sized_for
from kvsearch.app.importance import with_importance
from kvsearch.app.policies import check_names, resolve
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError
from kvsearch.evaluation import throughput
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.load import require_context
from kvsearch.records import Throughput
from kvsearch.text import TextLike, windows


def bench(
    policy: str,
    shown: Shown,
    *,
    model: str,
    dtype: str,
    device: str,
    text: tuple[TextLike, ...],
    dataset: str | None,
    budget_slots: float | None,
    budget_bytes: int | None,
    heads: Path | None,
    measure_heads: bool = False,
    context: int,
    pairs: int,
    steps: int,
    cuda_graphs: bool = False,
) -> tuple[str, Throughput]:
    """Time `policy`, a method or a file; returns its name and the measurement."""
    if context < 1 or pairs < 1 or steps < 1:
        raise KvsearchError("--context, --pairs and --steps must be at least 1")
    check_budget(budget_slots, budget_bytes)
    check_names((policy,), sized=budget_slots is not None or budget_bytes is not None)
    inputs.require_files(text)
    need = throughput.needed(context, pairs, steps)
    loaded = inputs.model(model, dtype=dtype, device=device, context=need, say=shown.say)
    if cuda_graphs:
        throughput.require_graphs(loaded)
    budget = in_both_units(loaded.shape, budget_slots, budget_bytes)
    setting = sized_for(loaded.shape, budget, need)
    tokens = inputs.tokenized(loaded, inputs.source(text, dataset, shown.say))
    inputs.kernels(loaded, shown.say)
    setting = of_heads.for_policies(
        setting, (policy,), loaded, shown, file=heads, anew=measure_heads
    )
    setting = with_importance(
        setting, (policy,), Evaluator(loaded), tokens, count=1, length=need, shown=shown
    )
    chosen = resolve((policy,), setting)[0]
    need = throughput.needed(context, pairs, steps, throughput.warm(chosen, cuda_graphs))
    require_context(loaded.model.config, need)
    ids = windows(tokens, count=1, length=need)[0]
    with shown.step("decode speed", pairs) as step:
        found = throughput.measure(
            loaded,
            chosen,
            ids,
            context=context,
            pairs=pairs,
            steps=steps,
            graphs=cuda_graphs,
            progress=lambda _: step.advance(),
        )
    return chosen.name or policy, found
