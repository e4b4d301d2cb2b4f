"""The base of every value type that crosses a boundary: policies, rules, spaces, run options."""

import re

from pydantic import BaseModel, ConfigDict, ValidationError


class Frozen(BaseModel):
    """Immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
