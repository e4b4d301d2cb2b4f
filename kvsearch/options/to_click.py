"""Options of commands, made from the fields of configs."""

from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

from kvsearch.options.declare import Config, Word, flags_of

F = Callable[..., Any]
OUTPUT = "Output"  # the heading of options without one


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
    """A value that a function makes of a word, or refuses in words of its own."""

    def __init__(self, word: Word) -> None:
        self.name, self.word = word.name, word

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What the function makes of it."""
        try:
            return self.word.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Option(click.Option):
    """An option with the heading of the help that it is under.

    Attributes:
        group: the heading.
        instead: name of the option that it excludes.
    """

    def __init__(
        self, *args: Any, group: str = OUTPUT, instead: str | None = None, **how: Any
    ) -> None:
        super().__init__(*args, **how)
        self.group, self.instead = group, instead


def shown(*configs: type[Config]) -> list[Field[Any]]:
    """Fields that are options of a command, each once: its own, then those under each heading."""
    found = {f.name: f for kind in reversed(configs) for f in fields(kind)}
    order = dict.fromkeys(f.name for kind in configs for f in fields(kind))
    told = [found[n] for n in order if "help" in found[n].metadata]
    mine = [f for f in told if not f.metadata.get("hidden")]
    groups = ["", *dict.fromkeys(f.metadata.get("group", "") for f in mine)]
    return sorted(mine, key=lambda f: groups.index(f.metadata.get("group", "")))


def options(*configs: type[Config]) -> Callable[[F], F]:
    """The options of configs; of one that several have, as the first declares it."""

    def add(f: F) -> F:
        for field in reversed(shown(*configs)):
            f = click.option(*_flags(field), field.name, cls=Option, **_how(field))(f)
        return f

    return add


def _flags(field: Field[Any]) -> list[str]:
    flags = flags_of(field)
    if field.default is True:
        return [f"{flags[0]}/--no-{flags[0][2:]}"]
    return flags


def _how(field: Field[Any]) -> dict[str, Any]:
    """What `click.option` takes beside the flags of an option."""
    told, kinds = field.metadata, set(_kinds(field.type))
    default = None if told.get("required") else told.get("shell", field.default)
    how = {k: told[k] for k in ("help", "metavar", "required", "group", "instead") if k in told}
    untold = default in (None, "", ()) or default is False or "[default: " in told["help"]
    how |= {"default": default, "show_default": not untold, "multiple": default == ()}
    if bool in kinds:
        return {k: v for k, v in how.items() if k != "multiple"} | {"is_flag": True}
    if "word" in told:
        how["type"] = Parsed(told["word"])
    elif Path in kinds:
        how["type"] = PLACE
    elif words := [k for k in kinds if get_origin(k) is Literal]:
        how["type"] = click.Choice(get_args(words[0]))
    else:
        how["type"] = next((k for k in (int, float) if k in kinds), str)
    return how


def _kinds(kind: Any) -> Iterator[Any]:
    """A type and all that are in it."""
    yield kind
    if get_origin(kind) is not Literal:
        for inner in get_args(kind):
            yield from _kinds(inner)


def output_options(f: F) -> F:
    """What to print."""
    f = click.option("--debug", is_flag=True, help="show tracebacks", expose_value=False)(f)
    f = click.option("--quiet", is_flag=True, help="no progress")(f)
    return click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")(f)
