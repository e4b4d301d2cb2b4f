"""The base of every value type that crosses a boundary: policies, rules, spaces, run options."""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from kvsearch.errors import KvsearchError, RunError, quoted

T = TypeVar("T")
MOST = 1 << 60  # no count of tokens or bytes is larger, and what is made of it stays in range


class Frozen(BaseModel):
    """Immutable, no unknown fields, no infinities; every value is of the type that JSON gives it.

    Numbers are neither text nor true and false, and true and false are neither text nor numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_in_json(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = _fields(cls)[info.field_name or ""]
        if kinds & {int, float} and not kinds & {str, Any}:
            for v in _leaves(value):
                if (isinstance(v, bool) and bool not in kinds) or _reads(v):
                    raise ValueError("expected a number")
                if isinstance(v, int | float) and MOST < abs(v) < inf and float not in kinds:
                    raise ValueError("whole numbers go to 2^60")
        elif kinds == {bool} and type(value) in (int, float, str):
            raise ValueError("expected true or false")
        return value


@cache
def _fields(model: type[BaseModel]) -> dict[str, set[Any]]:
    """The types that the type of each field is made of; words of a `Literal` are none."""
    return {n: _kinds(f.annotation) - {type(None)} for n, f in model.model_fields.items()}


def _kinds(annotation: Any) -> set[Any]:
    """The types that a type is made of, those of the numbers of a `Literal` too."""
    if isinstance(annotation, bool | int):
        return {type(annotation)}
    own = {annotation} if annotation is Any or isinstance(annotation, type) else set()
    return own.union(*(_kinds(a) for a in get_args(annotation)))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in a list, or in lists of lists; anything else is itself."""
    if isinstance(value, list | tuple):
        for v in value:
            yield from _leaves(v)
    else:
        yield value


def _reads(value: Any) -> bool:
    """Whether it is text that can be read as a number."""
    try:
        return isinstance(value, str) and bool(str(float(value)))
    except ValueError:
        return False


def has_half(text: str) -> bool:
    """Whether half of a character is in it (a lone surrogate), which UTF-8 cannot hold."""
    return re.search("[\ud800-\udfff]", text) is not None


def whole(text: str) -> str:
    """A text with escapes for halves of characters, as names of files that are no UTF-8 have."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON text as a dict.

    Raises:
        KvsearchError: it names a field twice; readers of JSON differ in which one counts.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise KvsearchError(f"field {quoted(name)} is given twice")
        found[name] = value
    return found


_WORDS = {  # pydantic names classes of ours and types of Python
    "model_type": "expected an object",
    "dict_type": "expected an object",
    "dataclass_type": "expected an object",
    "tuple_type": "expected a list",
    "missing": "is missing",
    "extra_forbidden": "there is no such field",
}


def why(error: Mapping[str, Any]) -> str:
    """What is wrong, on one line, in words of the file and not of Python."""
    words = " ".join(error["msg"].removeprefix("Value error, ").split())
    return _WORDS.get(error["type"], words)


def first_error(error: ValidationError, whole: str = "policy") -> str:
    """The first wrong field on one line: its path, why, and what was given."""
    first = error.errors()[0]
    # of a field of several types, pydantic names the type that it tried, as `tuple[float, ...]`
    places = [str(p) for p in first["loc"] if "[" not in str(p)]
    path = ".".join(" ".join(p.split()) or "''" for p in places)
    given = first.get("input")
    shown = "" if isinstance(given, dict | list) else f", got {quoted(given)}"
    message = why(first)
    if own := re.match(r"([a-z_]+(\.[\w']+)*): ", message):  # rules, and fields together
        message = message[own.end() :]
        path = f"{path}.{own[1]}" if path and "." not in own[1] and path != own[1] else own[1]
    return f"field {path[:200] or whole}: {message}{shown[:200]}"


def read_as(file: Path, kind: TypeAdapter[T], schema: str | None = None) -> T:
    """What a file holds.

    Args:
        file: JSON.
        kind: of the whole.
        schema: that it names.

    Raises:
        FileNotFoundError: there is none.
        RunError: it is damaged, or has another schema.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise RunError(f"{file} is damaged: it holds no object; restore it")
        if schema is not None and found["schema"] != schema:
            raise RunError(
                f"{file} was written as {quoted(found['schema'])}, and this kvsearch reads "
                f"{quoted(schema)}"
            )
        return kind.validate_python(found)
    except (RunError, FileNotFoundError):
        raise
    except ValidationError as e:
        raise RunError(f"{file} is damaged: {first_error(e, 'of a run')}; restore it") from e
    except OSError as e:
        raise RunError(f"cannot read {file}: {e.strerror or e}; restore it") from e
    except RecursionError as e:
        raise RunError(f"{file} is damaged: nested too deeply; restore it") from e
    except ValueError as e:
        raise RunError(f"{file} is damaged: not JSON ({e}); restore it") from e
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{file} is damaged: {quoted(e)}; restore it") from e
