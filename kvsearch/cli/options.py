"""Options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

F = Callable[..., Any]


def model_options(f: F) -> F:
    """Which model, where."""
    f = click.option("--batch", default=1, show_default=True, help="windows per forward pass")(f)
    f = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N")(
        f
    )
    f = click.option(
        "--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, float16"
    )(f)
    return click.option(
        "--model",
        default="smollm2-135m",
        show_default=True,
        help="alias, hub id, folder or .gguf file",
    )(f)


def text_options(f: F) -> F:
    """Which text."""
    f = click.option("--dataset", help="wikitext2, pg19, ptb, ... from the Hugging Face hub")(f)
    return click.option(
        "--text",
        "files",
        multiple=True,
        metavar="FILE",
        help="text file, or FILE:START-END in bytes; repeatable. Default: Python's own reference",
    )(f)


def output_options(f: F) -> F:
    """What to print."""
    f = click.option("--debug", is_flag=True, help="show tracebacks", expose_value=False)(f)
    f = click.option("--quiet", is_flag=True, help="no progress")(f)
    return click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")(f)
