"""Search KV-cache policies for a language model; run the best one.

from kvsearch import Policy, PolicyCache
cache = PolicyCache.from_json("policy.json", model)
model.generate(**inputs, past_key_values=cache)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.cache.huggingface import PolicyCache
    from kvsearch.models.load import LoadedModel, load_model
    from kvsearch.policy import Policy

__all__ = ["LoadedModel", "Policy", "PolicyCache", "load_model"]
_HOMES = {
    "Policy": "kvsearch.policy",
    "PolicyCache": "kvsearch.cache.huggingface",
    "load_model": "kvsearch.models.load",
    "LoadedModel": "kvsearch.models.load",
}


def __getattr__(name: str) -> Any:
    """Import public names when they are asked for; `import kvsearch` itself loads nothing."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(name)
