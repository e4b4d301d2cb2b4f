"""`kvsearch push`."""

from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.to_click import PLACE, output_options


@click.command("push")
@click.argument("source", type=PLACE)
@click.argument("repository", required=False)
@click.option("-o", "--out", type=PLACE, help="a folder instead of the hub")
@click.option("--model", help="of the policy, where it lies in no run")
@click.option("--private", is_flag=True, help="a private repository")
@click.option("--force", is_flag=True, help="overwrite existing files of the folder")
@output_options
def command(as_json: bool, quiet: bool, **given: Any) -> None:
    """Share a policy with a card of its figures.

    SOURCE is a policy file or a run folder; REPOSITORY a hub id owner/name.
    """
    from kvsearch.commands.push import push

    done = push(**given)
    none = "without figures: it lies in no finished run that measured it"
    figures = "with figures of its run" if done.measured else none
    answer(as_json, done.__dict__, f"{done.where}: {', '.join(done.files)}, {figures}")
