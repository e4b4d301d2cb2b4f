"""Search spaces: YAML files with a closed schema and no code."""

from kvsearch.space.axis import Axis, drawn, on_grid
from kvsearch.space.files import load, names
from kvsearch.space.search_space import SearchSpace

__all__ = ["Axis", "SearchSpace", "drawn", "load", "names", "on_grid"]
