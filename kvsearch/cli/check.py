"""`kvsearch check`."""

import sys

import click

from kvsearch.cli.options import output_options
from kvsearch.cli.output import print_json


@click.command("check")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16, float16")
@output_options
def command(device: str, dtype: str, as_json: bool, quiet: bool) -> None:
    """Test every kernel on this machine, and on a GPU CUDA graphs of tokens.

    Exit code 1 if something is wrong. Where a kernel is, its slower reference runs instead.
    """
    from kvsearch.app.check import check
    from kvsearch.app.progress import Shown

    found = check(Shown(quiet), device=device, dtype=dtype)
    if as_json:
        print_json(found.to_dict())
    else:
        click.echo(str(found))
    sys.exit(1 if found.wrong else 0)
