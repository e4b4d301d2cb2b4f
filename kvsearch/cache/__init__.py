"""A policy as it runs: slots, scores, compaction, and the Hugging Face cache around them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.cache.huggingface import PolicyCache

__all__ = ["PolicyCache"]


def __getattr__(name: str) -> Any:
    """Import the cache when it is asked for: it brings in transformers."""
    if name == "PolicyCache":
        from kvsearch.cache.huggingface import PolicyCache

        return PolicyCache
    raise AttributeError(name)
