"""`kvsearch bench`: decode speed of one policy."""

from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any, NamedTuple

from kvsearch.app import heads as of_heads
from kvsearch.app import inputs
from kvsearch.app.budget import check_budget, in_both_units, sized_for
from kvsearch.app.importance import with_importance
from kvsearch.app.policies import PolicyLike, check_names, resolve
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError
from kvsearch.evaluation import throughput
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.aliases import DEFAULT
from kvsearch.models.load import LoadedModel, require_context
from kvsearch.records import Throughput
from kvsearch.text import TextLike, windows

CONTEXT = 2048  # tokens in the cache at the start


class Benched(NamedTuple):
    """Decode speed of a policy.

    Attributes:
        policy: its name.
        throughput: tokens/s and bytes, beside those of the full cache.
    """

    policy: str
    throughput: Throughput

    def document(self) -> dict[str, Any]:
        """What `kvsearch bench --json` prints."""
        return {"policy": self.policy, **asdict(self.throughput)}


def bench(
    policy: PolicyLike,
    model: str | PathLike[str] | LoadedModel = DEFAULT,
    text: TextLike | Sequence[TextLike] | None = None,
    *,
    dataset: str | None = None,
    budget_slots: float | None = None,
    budget_bytes: int | None = None,
    heads: str | PathLike[str] | None = None,
    measure_heads: bool = False,
    context: int = CONTEXT,
    pairs: int = 5,
    steps: int = 16,
    cuda_graphs: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = False,
) -> Benched:
    """Measure decode tokens/s and bytes of a deployed policy against the full cache, in pairs.

    Args:
        policy: a method, a policy file or a policy.
        model: as for `kvsearch.search`.
        text: as for `kvsearch.search`; its first tokens fill the cache.
        dataset: a named dataset, instead of a text.
        budget_slots: size a method to this many fp16 slots per layer.
        budget_bytes: size a method to this many bytes per sequence, instead.
        heads, measure_heads: as for `kvsearch.evaluate`.
        context: tokens in the cache at the start.
        pairs: timed pairs of the policy and the full cache.
        steps: tokens decoded per half of a pair.
        cuda_graphs: on a GPU: decode with replays of CUDA graphs, both caches.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        progress: print progress to stderr.

    Returns:
        The policy's name, and tokens/s and bytes of both caches.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    shown = Shown(quiet=not progress)
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
    assert chosen.name is not None, "`resolve` names every policy"
    return Benched(chosen.name, found)
