"""Search KV-cache policies for a language model; run the best one.

import kvsearch
found = kvsearch.search("smollm2-135m", "mine.txt", budget_slots=256)
cache = kvsearch.PolicyCache(found.best, model)
model.generate(**inputs, past_key_values=cache)

Every command of the command line but `init`, `study`, `check` and `lm-eval` is a function of the
same name and options here, or a method of what one of them returns.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.cache.huggingface import PolicyCache
    from kvsearch.commands.adapt import adapt
    from kvsearch.commands.bench import bench
    from kvsearch.commands.evaluate import evaluate
    from kvsearch.commands.export import export
    from kvsearch.commands.heads import heads
    from kvsearch.commands.learn import learn
    from kvsearch.commands.need import need
    from kvsearch.commands.prune import prune
    from kvsearch.commands.push import push
    from kvsearch.commands.run import SearchResult, search
    from kvsearch.commands.tables import methods, targets, tasks
    from kvsearch.commands.verify import verify
    from kvsearch.errors import KvsearchError
    from kvsearch.models.load import LoadedModel, load_model
    from kvsearch.options.run_config import RunConfig
    from kvsearch.policy import Policy
    from kvsearch.policy_space import SearchSpace
    from kvsearch.rules import Rule
    from kvsearch.workloads.text import Text

__all__ = [
    "KvsearchError", "LoadedModel", "Policy", "PolicyCache", "Rule", "RunConfig", "SearchResult",
    "SearchSpace", "Text", "adapt", "bench", "evaluate", "export", "heads",
    "learn", "load_model", "methods", "need", "prune", "push", "search", "targets", "tasks",
    "verify",
]  # fmt: skip
_MODULES = {
    "KvsearchError": "kvsearch.errors",
    "LoadedModel": "kvsearch.models.load",
    "Policy": "kvsearch.policy",
    "PolicyCache": "kvsearch.cache.huggingface",
    "Rule": "kvsearch.rules",
    "RunConfig": "kvsearch.options.run_config",
    "SearchResult": "kvsearch.commands.run",
    "SearchSpace": "kvsearch.policy_space",
    "Text": "kvsearch.workloads.text",
    "load_model": "kvsearch.models.load",
    "methods": "kvsearch.commands.tables",
    "search": "kvsearch.commands.run",
    "targets": "kvsearch.commands.tables",
    "tasks": "kvsearch.commands.tables",
}  # the others are in the module of `kvsearch.commands` that has their name


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for; `import kvsearch` itself loads nothing."""
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, f"kvsearch.commands.{name}")), name)
    raise AttributeError(f"module 'kvsearch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
