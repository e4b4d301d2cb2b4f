"""YAML files that people write: read without code, and one sentence for whatever is wrong."""

from pathlib import Path
from typing import Any

import yaml

from kvsearch.errors import KvsearchError


def read_mapping(path: Path, what: str, error: type[KvsearchError]) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what it should be, for the sentence, such as `search space`.
        error: raised with that sentence.

    Raises:
        KvsearchError: it cannot be read, is no YAML, is nested too deeply, or is no mapping.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise error(f"cannot read {what} {path}: {e}") from e
    except RecursionError as e:
        raise error(f"{path}: nested too deeply for a {what}") from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(e, "problem", None) or e).split())
        raise error(f"{path}: not YAML{where}: {problem}") from e
    except ValueError as e:  # such as the 45th of a month
        raise error(f"{path}: not YAML: {e}") from e
    if not isinstance(data, dict):
        raise error(f"{path}: expected a mapping, got {kind(data)}")
    return data


def kind(value: Any) -> str:
    """What a value of a YAML file is, in words."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number"}
    names |= {float: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
