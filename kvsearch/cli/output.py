"""What the commands print on stdout for programs."""

import json
from typing import Any

import click

from kvsearch.records import finite


def print_json(document: Any, indent: int | None = None) -> None:
    """Print one JSON document on stdout.

    JSON has no word for a number that is not finite, such as a limit of an interval over a single
    block: it becomes null.
    """
    click.echo(json.dumps(finite(document), allow_nan=False, indent=indent))
