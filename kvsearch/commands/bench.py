"""`kvsearch bench`: decode speed of one policy."""

from dataclasses import asdict
from typing import Any, NamedTuple

from kvsearch.evaluation import throughput
from kvsearch.models.load import require_context
from kvsearch.options.function import takes
from kvsearch.options.other_commands import BenchConfig
from kvsearch.results.records import Throughput
from kvsearch.session import load
from kvsearch.session.session import Session
from kvsearch.workloads.text import windows


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
    session = Session(config, config.policy)
    context, pairs, steps = config.context, config.pairs, config.steps
    need = throughput.needed(context, pairs, steps)
    loaded = session.load(context=need)
    if config.cuda_graphs:
        throughput.require_graphs(loaded)
    setting, tokens = session.setting(need), session.text
    load.kernels(loaded, session.shown.say)
    (chosen,) = session.policies(session.measured(setting, tokens, length=need))
    need = throughput.needed(context, pairs, steps, throughput.warm(chosen, config.cuda_graphs))
    require_context(loaded.model.config, need)
    ids = windows(tokens, count=1, length=need)[0]
    with session.shown.step("decode speed", pairs) as step:
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
