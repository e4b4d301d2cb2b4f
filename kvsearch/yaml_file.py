"""YAML files that people write: read without code, and one sentence for whatever is wrong."""

import re
from pathlib import Path
from typing import Any

import yaml

from kvsearch.errors import KvsearchError, named, quoted, reason
from kvsearch.frozen import has_half


class _Loader(yaml.SafeLoader):
    """YAML's own keeps the last of two equal keys in silence; this one refuses them."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (word := (key.tag, key.value)) in seen:
                problem = f"key {quoted(key.value)} is given twice; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(word)
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and has_half(value):
            problem = "half of a character (\\ud800 to \\udfff)"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value


_Loader.add_implicit_resolver(  # 1e3 and 1.5e3, which are text in YAML 1.1
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+\Z"),
    list("-+0123456789"),
)


def read_mapping(path: Path, what: str, error: type[KvsearchError]) -> dict[Any, Any]:
    """The mapping in a YAML file.

    Args:
        path: the file.
        what: what it should be, for the sentence, such as `search space`.
        error: raised with that sentence.

    Raises:
        KvsearchError: it cannot be read, is no YAML or too deep, has a key twice, or is no mapping.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as e:
        raise error(f"cannot read {what} {named(path)}: {reason(e)}") from e
    except RecursionError as e:
        raise error(f"{path}: nested too deeply for a {what}") from e
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        problem = " ".join(str(getattr(e, "problem", None) or e).split())
        raise error(f"{path}: not YAML{where}: {problem}") from e
    except ValueError as e:  # such as the 45th of a month, or thousands of digits
        raise error(f"{path}: not YAML: {str(e).partition(';')[0]}") from e
    if not isinstance(data, dict):
        raise error(f"{path}: expected a mapping, got {kind(data)}")
    return data


def kind(value: Any) -> str:
    """What a value of a YAML file is, in words."""
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", int: "a number"}
    names |= {float: "a number", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
