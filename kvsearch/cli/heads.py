"""`kvsearch heads`."""

import json
from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import HeadsConfig
from kvsearch.options.to_click import options, output_options


@click.command("heads")
@options(HeadsConfig)
@output_options
def command(as_json: bool, quiet: bool, **given: Any) -> None:
    """Measure what every KV head of a model loses in a small cache, once per model.

    Budgets per KV head follow it. It also says what the keys of each layer have in common, which
    `offset` leaves out. The file that `-o` writes is read by `--heads` of run, eval and
    bench, here or on another machine.
    """
    from kvsearch.commands.heads import heads
    from kvsearch.report.terminal import head_lines, key_lines

    found = heads(**given, progress=not quiet)
    data = json.loads(found.text) | {"key_means": found.keys.shares}
    lines = head_lines(found.losses, found.where) + "\n" + key_lines(found.keys)
    answer(as_json, data, lines)
