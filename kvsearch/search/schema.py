"""Versions of the JSON files in a run folder, and how older files are read by the present names."""

from typing import Any

from kvsearch.errors import RunError, quoted
from kvsearch.records import modern_kind
from kvsearch.search.samplers import OLD_NAMES

SCHEMA = "kvsearch.run/3"  # of study.json, measured.json and frozen.json
_BEFORE = "kvsearch.run/2"  # without growing windows
_SETTINGS = {
    "budget": "budget_slots",
    "racing": "race",
    "warm": "warm_start",
    "without": "exclude_method",
    "also": "extra_text",
}


def study(data: dict[str, Any]) -> dict[str, Any]:
    """`study.json` of any version by the present names.

    Raises:
        RunError: a newer version of kvsearch wrote it.
    """
    if _current(data):
        return data
    settings = {_SETTINGS.get(k, k): v for k, v in data["settings"].items()} | {"grow": False}
    if settings.get("sampler") in OLD_NAMES:
        settings["sampler"] = OLD_NAMES[settings["sampler"]]
    return {**data, "schema": SCHEMA, "settings": settings}


def measured(data: dict[str, Any]) -> dict[str, Any]:
    """`measured.json` of any version by the present names; parts of its texts keep theirs.

    Raises:
        RunError: a newer version of kvsearch wrote it.
    """
    if _current(data) or data.get("schema") == _BEFORE:
        return {**data, "schema": SCHEMA}
    rest = {k: v for k, v in data.items() if k not in ("also", "fits", "rows")}
    return {
        **rest,
        "schema": SCHEMA,
        "rows": [{**row, "kind": modern_kind(row["kind"])} for row in data["rows"]],
        "extra_text": data.get("also", {}),
        "compared": data["fits"],  # all but the full cache, in spite of the name
    }


def _current(data: dict[str, Any]) -> bool:
    """Whether this is the present version; the first one had no `schema`."""
    found = data.get("schema")
    if found not in (None, _BEFORE, SCHEMA):
        raise RunError(
            f"the run was written as {quoted(found)}, and this kvsearch reads {quoted(SCHEMA)}"
        )
    return bool(found == SCHEMA)
