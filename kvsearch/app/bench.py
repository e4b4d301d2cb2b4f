"""`kvsearch bench`: decode speed of one policy."""

from dataclasses import asdict
from typing import Any, NamedTuple

from kvsearch.app import heads as of_heads
from kvsearch.app import inputs
from kvsearch.app.importance import with_importance
from kvsearch.app.policies import check_names, resolve
from kvsearch.app.progress import Shown
from kvsearch.config.budget import sized_for
from kvsearch.config.commands import BenchConfig
from kvsearch.config.function import takes
from kvsearch.evaluation import throughput
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.load import require_context
from kvsearch.records import Throughput
from kvsearch.text import windows


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


@takes(BenchConfig)
def bench(config: BenchConfig) -> Benched:
    """Measure decode tokens/s and bytes of a deployed policy against the full cache, in pairs.

    Returns:
        The policy's name, and tokens/s and bytes of both caches.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    shown, asked = Shown(quiet=not config.progress), (config.policy,)
    context, pairs, steps = config.context, config.pairs, config.steps
    check_names(asked, sized=config.sized)
    inputs.require_files(config.text)
    need = throughput.needed(context, pairs, steps)
    loaded = inputs.model(config, context=need, say=shown.say)
    if config.cuda_graphs:
        throughput.require_graphs(loaded)
    setting = sized_for(loaded.shape, config.budget(loaded.shape), need)
    tokens = inputs.tokenized(loaded, inputs.source(config.text, config.dataset, shown.say))
    inputs.kernels(loaded, shown.say)
    setting = of_heads.for_policies(setting, asked, loaded, shown, config)
    setting = with_importance(
        setting, asked, Evaluator(loaded), tokens, count=1, length=need, shown=shown
    )
    chosen = resolve(asked, setting)[0]
    need = throughput.needed(context, pairs, steps, throughput.warm(chosen, config.cuda_graphs))
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
            graphs=config.cuda_graphs,
            progress=lambda _: step.advance(),
        )
    assert chosen.name is not None, "`resolve` names every policy"
    return Benched(chosen.name, found)
