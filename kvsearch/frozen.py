"""The base of every value type that crosses a boundary: policies, rules, spaces, run options."""

import re
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from kvsearch.errors import KvsearchError


class Frozen(BaseModel):
    """Immutable, no unknown fields, no infinities; numbers are neither words nor true and false."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name in _numbers(cls) and _words(value):
            raise ValueError("expected a number")
        return value


@cache
def _numbers(model: type[BaseModel]) -> frozenset[str]:
    """Fields that hold numbers and nothing else, or lists of them."""
    kinds = {name: _kinds(f.annotation) for name, f in model.model_fields.items()}
    return frozenset(n for n, k in kinds.items() if k & {int, float} and not k & {bool, str, Any})


def _kinds(annotation: Any) -> set[Any]:
    """The types that a type is made of, those of the values of a `Literal` too."""
    if isinstance(annotation, str | bool):
        return {type(annotation)}
    own = {annotation} if annotation is Any or isinstance(annotation, type) else set()
    return own.union(*(_kinds(a) for a in get_args(annotation)))


def _words(value: Any) -> bool:
    """Whether a value is text, or true or false is in it."""
    if isinstance(value, list | tuple):
        return any(_words(v) for v in value if not isinstance(v, str))
    return isinstance(value, bool | str)


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON text as a dict.

    Raises:
        KvsearchError: it names a field twice; readers of JSON differ in which one counts.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise KvsearchError(f"field {name!r:.80} is given twice")
        found[name] = value
    return found


def first_error(error: ValidationError, whole: str = "policy") -> str:
    """The first wrong field on one line: its path, why, and what was given."""
    first = error.errors()[0]
    # of a field of several types, pydantic names the type that it tried, as `tuple[float, ...]`
    places = [str(p) for p in first["loc"] if "[" not in str(p)]
    path = ".".join(" ".join(p.split()) for p in places) or whole
    given = first.get("input")
    shown = "" if isinstance(given, dict | list) else f", got {given!r}"
    message = " ".join(first["msg"].removeprefix("Value error, ").split())
    if re.match(r"[a-z_]+(\.\w+)+: ", message):  # rules, and fields together, name their own
        path, _, message = message.partition(": ")
    return f"field {path[:200]}: {message}{shown[:200]}"
