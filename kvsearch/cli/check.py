"""`kvsearch check`."""

import sys
from dataclasses import asdict

import click

from kvsearch.cli.options import options, output_options
from kvsearch.cli.output import answer


@click.command("check")
@options("device", "dtype", device={"help": "auto, cpu, cuda or cuda:N"})
@output_options
def command(device: str, dtype: str, as_json: bool, quiet: bool) -> None:
    """Test every kernel on this machine, and on a GPU CUDA graphs of tokens.

    Exit code 1 if something is wrong. Where a kernel is, its slower reference runs instead.
    """
    from kvsearch.app.check import check
    from kvsearch.app.progress import Shown

    found = check(Shown(quiet), device=device, dtype=dtype)
    answer(as_json, asdict(found), str(found))
    sys.exit(1 if found.wrong else 0)
