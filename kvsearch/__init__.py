"""Search KV-cache policies for a language model; run the best one.

import kvsearch
found = kvsearch.search("smollm2-135m", "mine.txt", budget_slots=256)
cache = kvsearch.PolicyCache(found.best, model)
model.generate(**inputs, past_key_values=cache)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.app.evaluate import evaluate
    from kvsearch.app.prompts import evaluate_prompts
    from kvsearch.app.search import search
    from kvsearch.cache.cuda_graphs import cuda_graphs
    from kvsearch.cache.huggingface import PolicyCache
    from kvsearch.models.load import LoadedModel, load_model
    from kvsearch.policy import Policy
    from kvsearch.text import Text

__all__ = [
    "LoadedModel", "Policy", "PolicyCache", "Text", "cuda_graphs", "evaluate",
    "evaluate_prompts", "load_model", "search",
]  # fmt: skip
_HOMES = {
    "Policy": "kvsearch.policy",
    "PolicyCache": "kvsearch.cache.huggingface",
    "evaluate": "kvsearch.app.evaluate",
    "evaluate_prompts": "kvsearch.app.prompts",
    "search": "kvsearch.app.search",
    "cuda_graphs": "kvsearch.cache.cuda_graphs",
    "Text": "kvsearch.text",
    "load_model": "kvsearch.models.load",
    "LoadedModel": "kvsearch.models.load",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for; `import kvsearch` itself loads nothing."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(name)
