"""`kvsearch check`."""

import sys
from dataclasses import asdict

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import CheckConfig
from kvsearch.options.to_click import options, output_options


@click.command("check")
@options(CheckConfig)
@output_options
def command(device: str, dtype: str, as_json: bool, quiet: bool) -> None:
    """Test every kernel on this machine, and on a GPU CUDA graphs of tokens.

    Exit code 1 if something is wrong. Where a kernel is, its slower reference runs instead.
    """
    from kvsearch.commands.check import check
    from kvsearch.session.progress import Shown

    found = check(Shown(quiet), device=device, dtype=dtype)
    answer(as_json, asdict(found), str(found))
    sys.exit(1 if found.wrong else 0)
