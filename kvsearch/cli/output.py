"""What the commands print on stdout for programs."""

import json
import math
from typing import Any

import click


def print_json(document: Any, indent: int | None = None) -> None:
    """Print one JSON document on stdout.

    JSON has no word for a number that is not finite, such as a limit of an interval over a single
    block: it becomes null.
    """
    click.echo(json.dumps(_finite(document), allow_nan=False, indent=indent))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
