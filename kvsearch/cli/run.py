"""`kvsearch run`."""

from typing import Any

import click

from kvsearch.cli.output import answer, loading, print_json
from kvsearch.options.from_yaml import Configured, config_option
from kvsearch.options.run_config import RunConfig
from kvsearch.options.to_click import options, output_options

NOT_HELD = 3
NOTHING: dict[str, Any] = {"out": None, "interrupted": True, "front": [], "rows": [], "trials": []}


@click.command("run", cls=Configured)
@config_option
@options(RunConfig)
@click.option(
    "--strict", is_flag=True, help="exit with 3 where nothing at the budget is within the limits"
)
@output_options
def command(as_json: bool, quiet: bool, strict: bool, **given: Any) -> None:
    """Search the policy space of a model and report the front.

    Running the same command again goes on where it stopped.
    """
    config = RunConfig(**given, progress=not quiet)
    try:
        with loading(quiet):
            from kvsearch.commands.run import search
            from kvsearch.report.terminal import closing

        found = search(config)
    except KeyboardInterrupt as stopped:
        begun: Any = stopped if hasattr(stopped, "trials") else None  # `Interrupted`, in a folder
        if as_json:
            print_json(begun.document() if begun else NOTHING)
        elif begun:
            click.echo(closing(begun.summary, begun.folder))
        raise
    answer(as_json, found.document(), closing(found.summary, found.folder))
    if strict and not found.within_limits:
        raise SystemExit(NOT_HELD)
