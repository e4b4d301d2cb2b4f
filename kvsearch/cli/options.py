"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvsearch.errors import KvsearchError, quoted
from kvsearch.models.aliases import DEFAULT

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


def model_options(f: F, default: str | None = DEFAULT) -> F:
    """Which model, where."""
    f = click.option(
        "--device",
        default="auto",
        show_default=True,
        help="auto, cpu, cuda, cuda:N, or several that share the layers: cuda:0,cuda:1",
    )(f)
    f = click.option(
        "--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, float16"
    )(f)
    return click.option(
        "--model",
        default=default,
        show_default=True,
        help="alias, hub id, folder or .gguf file",
    )(f)


def batch_option(f: F) -> F:
    """How many windows at once."""
    told = "windows per forward pass  [default: as many as fit on a GPU, 1 on a CPU]"
    return click.option("--batch", type=int, help=told)(f)


class Slots(click.types.FloatParamType):
    """A budget in slots; a size such as 256MB is told which option takes it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """As of any number, with words of its own where it is none."""
        try:
            return float(value)
        except ValueError:
            told = "is not a number of fp16 slots per layer; a size in bytes is --budget-bytes"
            self.fail(f"{quoted(value)} {told}", param, ctx)


class Count(click.ParamType[int | None]):
    """A number, or `auto`, which is None."""

    name = "N|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """The number."""
        if value is None or value == "auto":
            return None
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)


class Bytes(click.types.IntParamType):
    """A budget in bytes: 5000000, 5MB or 4.8MiB."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Whole bytes; what a unit makes of a fraction is rounded down."""
        from kvsearch.app.budget import bytes_of

        try:
            return bytes_of(value)
        except KvsearchError as error:
            self.fail(str(error), param, ctx)


def budget_options(purpose: str, default: str = "") -> Callable[[F], F]:
    """How much memory, in one of two units."""

    def add(f: F) -> F:
        f = click.option(
            "--budget-bytes",
            type=Bytes(),
            metavar="BYTES",
            help="the same per sequence in bytes, or as 5MB or 4.8MiB, instead",
        )(f)
        return click.option(
            "--budget",
            "--budget-slots",
            "budget_slots",
            type=Slots(),
            metavar="SLOTS",
            help=f"{purpose}, in fp16 slots per layer{default}",
        )(f)

    return add


def heads_options(f: F) -> F:
    """What budgets and bits per KV head follow."""
    f = click.option(
        "--measure-heads",
        is_flag=True,
        help="measure what the KV heads lose, even where that is shipped or kept on disk",
    )(f)
    return click.option(
        "--heads",
        type=PLACE,
        metavar="FILE",
        help="losses of the KV heads, written by `kvsearch heads` or a run [default: shipped, kept "
        "on disk, or measured once]",
    )(f)


def text_options(f: F) -> F:
    """Which text."""
    f = click.option("--dataset", help="wikitext2, pg19, ptb, ... from the Hugging Face hub")(f)
    return click.option(
        "--text",
        multiple=True,
        metavar="FILE",
        help="text file, or FILE:START-END in bytes; repeatable. Default: Python's own reference",
    )(f)


def prompt_options(f: F) -> F:
    """Which prompts, instead of a text."""
    f = click.option(
        "--prompts",
        type=PLACE,
        multiple=True,
        metavar="FILE",
        help="the same on your own prompts (.jsonl, .json, .csv, .parquet), or on a set of the "
        "hub: ruler, loogle, longbench, hf:OWNER/NAME, with :CONFIG and @SPLIT; repeatable",
    )(f)
    return task_options(f, "answers to prompts instead of a text: see `kvsearch tasks`")


def task_options(f: F, purpose: str) -> F:
    """Which tasks, and how they ask."""
    f = click.option(
        "--see",
        type=click.Choice(["agnostic", "aware"]),
        default="agnostic",
        show_default=True,
        help="whether a question arrives after the context was compressed, or is part of the "
        "prompt",
    )(f)
    return click.option(
        "--task",
        "tasks",
        multiple=True,
        metavar="NAME[:N][,tokens=N]",
        help=f"{purpose}; repeatable; `ruler` is all of RULER",
    )(f)


def output_options(f: F) -> F:
    """What to print."""
    f = click.option("--debug", is_flag=True, help="show tracebacks", expose_value=False)(f)
    f = click.option("--quiet", is_flag=True, help="no progress")(f)
    return click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")(f)
