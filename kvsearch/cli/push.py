"""`kvsearch push`."""

from pathlib import Path

import click

from kvsearch.cli.options import PLACE, output_options
from kvsearch.cli.output import print_json


@click.command("push")
@click.argument("source", type=PLACE)
@click.argument("repository", required=False)
@click.option("-o", "--out", type=PLACE, help="a folder instead of the hub")
@click.option("--model", help="of the policy, where it lies in no run")
@click.option("--private", is_flag=True, help="a private repository")
@click.option("--force", is_flag=True, help="overwrite existing files of the folder")
@output_options
def command(
    source: Path,
    repository: str | None,
    out: Path | None,
    model: str | None,
    private: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Share a policy with a card of its figures.

    SOURCE is a policy file or a run folder; REPOSITORY a hub id owner/name.
    """
    from kvsearch.app.push import push

    done = push(source, repository, out=out, model=model, private=private, force=force)
    if as_json:
        print_json(done.__dict__)
        return
    none = "without figures: it lies in no finished run that measured it"
    figures = "with figures of its run" if done.measured else none
    click.echo(f"{done.where}: {', '.join(done.files)}, {figures}")
