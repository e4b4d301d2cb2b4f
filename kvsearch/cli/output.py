"""What the commands print beside their results: JSON for programs, and that imports take long."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Any

import click

from kvsearch.files import finite

SLOW = 2.0  # seconds of imports, from which on they are worth a line


@contextmanager
def loading(quiet: bool) -> Iterator[None]:
    """Say that imports take their time, if they do: the first ones after an installation."""
    said = Timer(SLOW, lambda: click.echo("loading torch and transformers ...", err=True))
    said.daemon = True
    if not quiet:
        said.start()
    try:
        yield
    finally:
        said.cancel()


def answer(as_json: bool, document: Any, text: str) -> None:
    """Print the result of a command: for programs, or for people."""
    if as_json:
        print_json(document)
    else:
        click.echo(text)


def print_json(document: Any, indent: int | None = None) -> None:
    """Print one JSON document on stdout.

    JSON has no word for a number that is not finite, such as a limit of an interval over a single
    block: it becomes null.
    """
    click.echo(json.dumps(finite(document), allow_nan=False, indent=indent))
