"""Files of search spaces: those that come with kvsearch, and people's own."""

from importlib.resources import files
from os.path import isfile
from pathlib import Path

from pydantic import ValidationError

from kvsearch.errors import SpaceError, nearest, quoted
from kvsearch.frozen import why
from kvsearch.policy_space.space import SearchSpace
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
        found = [p for f in _folders() if isfile(p := f / f"{name}.yaml")]
        if not found:
            raise SpaceError(f"unknown search space {quoted(name)}{nearest(name, names())}")
        path = found[0]
    data = read_mapping(path, "search space", SpaceError)
    try:
        return SearchSpace.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        places, wrong = [str(p) for p in first["loc"]], why(first)
        if places[-1:] == ["str"]:  # the first of the types that a value may have
            places, wrong = places[:-1], "expected a word, a number, or true or false"
        loc = ".".join(places)
        sentence = f"{path}: {'field ' + loc + ': ' if loc else ''}{wrong}"
        raise SpaceError(" ".join(sentence.split())) from e
    except RecursionError as e:  # a list that an alias puts into itself
        raise SpaceError(f"{path}: nested too deeply for a search space") from e
