"""`kvsearch init`."""

from pathlib import Path

import click

from kvsearch.cli.output import answer
from kvsearch.options.to_click import PLACE, output_options


@click.command("init")
@click.argument("file", type=PLACE, default="run.yaml")
@click.option("--force", is_flag=True, help="replace a file that is there")
@output_options
def command(file: Path, force: bool, as_json: bool, quiet: bool) -> None:
    """Write FILE [run.yaml] with every option of `kvsearch run`, for its --config."""
    from kvsearch.cli.run import command as run
    from kvsearch.errors import RunError
    from kvsearch.files import write_atomic
    from kvsearch.options.from_yaml import template

    if file.exists() and not force:
        raise RunError(f"{file} is there already; give another name, or --force to replace it")
    write_atomic(file, template(run, file.name))
    answer(as_json, {"file": str(file)}, str(file))
