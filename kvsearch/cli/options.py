"""Options of the commands; those of a search are made from their declaration."""

from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from kvsearch.errors import quoted

F = Callable[..., Any]


class Place(click.Path):
    """A file or folder by its name.

    Without a name it would be the current folder: so says `pathlib`, and nobody means it.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A `Path`."""
        if value == "":
            self.fail("the name is empty; the current folder is called .", param, ctx)
        return super().convert(value, param, ctx)


PLACE = Place(path_type=Path)


class Parsed(click.ParamType[Any]):
    """A value that a function makes of a word, or refuses in words of its own.

    Args:
        name: of what is asked for.
        parse: raises a `ValueError`, which says what is wrong.
    """

    def __init__(self, name: str, parse: Callable[[Any], Any]) -> None:
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What the function makes of it."""
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _slots(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        told = "is not a number of fp16 slots per layer; a size in bytes is --budget-bytes"
        raise ValueError(f"{quoted(value)} {told}") from None


def _count(value: Any) -> int | None:
    """The number, or None for `auto`."""
    try:
        return None if value in (None, "auto") else int(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a whole number nor auto") from None


def _bytes(value: Any) -> int:
    """Whole bytes of 5000000, 5MB or 4.8MiB; what a unit makes of a fraction is rounded down."""
    from kvsearch.app.budget import bytes_of

    return bytes_of(value)


SLOTS, BYTES, COUNT = Parsed("float", _slots), Parsed("integer", _bytes), Parsed("N|auto", _count)
TYPES = {"budget_slots": SLOTS, "budget_bytes": BYTES, "trials": COUNT}


def options(*names: str, **changed: dict[str, Any]) -> Callable[[F], F]:
    """Options that `RunOptions` declares, in this order; all of them without names.

    Args:
        names: of its fields.
        changed: by name, what another command has instead, as `click.option` takes it.
    """

    def add(f: F) -> F:
        from kvsearch.app.options import RunOptions

        declared = {field.name: field for field in fields(RunOptions)}
        for name in reversed(names or tuple(declared)):
            flags, how = _option(declared[name])
            f = click.option(*flags, name, **{**how, **changed.get(name, {})})(f)
        return f

    return add


def _option(field: Field[Any]) -> tuple[list[str], dict[str, Any]]:
    """Spellings of an option, and what else `click.option` takes, from its declaration."""
    told = field.metadata
    default = told.get("shown", field.default)
    flags = told.get("flags", f"--{field.name.replace('_', '-')}").split()
    how: dict[str, Any] = {"help": told["help"], "default": default, "metavar": told.get("metavar")}
    untold = default in (None, "", ()) or default is False or "[default: " in told["help"]
    how["show_default"] = not untold
    kind = set(get_args(field.type)) or {field.type}
    if isinstance(default, bool):
        flags = [f"{flags[0]}/--no-{flags[0][2:]}" if default else flags[0]]
        return flags, {**how, "is_flag": True}
    if Path in kind:
        how["type"] = PLACE
    elif get_origin(field.type) is Literal:
        how["type"] = click.Choice(get_args(field.type))
    else:
        how["type"] = TYPES.get(field.name, next((k for k in (int, float) if k in kind), str))
    return flags, {**how, "multiple": default == ()}


model_options = options("model", "dtype", "device")
text_options = options("text", "dataset")
prompt_options = options("tasks", "see", "prompts")
heads_options = options("heads", "measure_heads")


prompt_option = click.option(
    "--prompt",
    default=0,
    show_default=True,
    help="tokens that arrive in one call, for policies triggered by a prompt; not scored",
)


def budget_options(purpose: str) -> Callable[[F], F]:
    """How much memory, in one of two units."""
    told = {"help": f"{purpose}, in fp16 slots per layer"}
    return options("budget_slots", "budget_bytes", budget_slots=told)


def output_options(f: F) -> F:
    """What to print."""
    f = click.option("--debug", is_flag=True, help="show tracebacks", expose_value=False)(f)
    f = click.option("--quiet", is_flag=True, help="no progress")(f)
    return click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")(f)
