"""Search KV-cache policies for a language model; run the best one.

import kvsearch
found = kvsearch.search("smollm2-135m", "mine.txt", budget_slots=256)
cache = kvsearch.PolicyCache(found.best, model)
model.generate(**inputs, past_key_values=cache)
"""

import inspect
from importlib import import_module
from types import ModuleType
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
    "evaluate_prompts": "kvsearch.app.prompts",
    "cuda_graphs": "kvsearch.cache.cuda_graphs",
    "Text": "kvsearch.text",
    "load_model": "kvsearch.models.load",
    "LoadedModel": "kvsearch.models.load",
}


class _Callable(ModuleType):
    """A subpackage that can be called: `kvsearch.search(...)` is `kvsearch.app.search.search`."""

    @property
    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(f"kvsearch.app.{name}"), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function of the same name in `kvsearch.app`."""
        return self._function(*args, **options)


for _name in ("search", "evaluate"):  # importing these two packages loads nothing else
    import_module(f"kvsearch.{_name}").__class__ = _Callable


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for; `import kvsearch` itself loads nothing."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(name)
