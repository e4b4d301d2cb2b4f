"""Finding, loading and describing models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvsearch.models.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> Any:
    """Import the loader when it is asked for: it brings in torch and transformers."""
    if name in __all__:
        from kvsearch.models import load

        return getattr(load, name)
    raise AttributeError(name)
