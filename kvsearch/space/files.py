"""Files of search spaces: those that come with kvsearch, and people's own."""

from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from kvsearch.errors import SpaceError, nearest
from kvsearch.frozen import why
from kvsearch.space.search_space import SearchSpace
from kvsearch.yaml_file import read_mapping


def _folders() -> list[Path]:
    shipped = Path(str(files("kvsearch"))) / "_search_spaces"
    checkout = Path(__file__).resolve().parents[2] / "search_spaces"
    return [f for f in (shipped, checkout) if f.is_dir()]


def names() -> list[str]:
    """Spaces that come with kvsearch."""
    return sorted({p.stem for folder in _folders() for p in folder.glob("*.yaml")})


def load(name: str) -> SearchSpace:
    """Read a space by name or path.

    Raises:
        SpaceError: no such space, or a wrong field, whose path is named.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        found = [f / f"{name}.yaml" for f in _folders() if (f / f"{name}.yaml").is_file()]
        if not found:
            raise SpaceError(f"unknown search space {name!r}{nearest(name, names())}")
        path = found[0]
    data = read_mapping(path, "search space", SpaceError)
    try:
        return SearchSpace.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        loc = ".".join(str(p) for p in first["loc"])
        sentence = f"{path}: {'field ' + loc + ': ' if loc else ''}{why(first)}"
        raise SpaceError(" ".join(sentence.split())) from e
