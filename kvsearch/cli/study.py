"""`kvsearch study check` and `kvsearch study rebuild`."""

from pathlib import Path

import click

from kvsearch.cli.output import print_json

FOLDERS = click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)


@click.group("study")
def command() -> None:
    """Kept studies: do their tables follow from their records?"""


@command.command("check")
@FOLDERS
@click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout")
def check(folders: tuple[Path, ...], as_json: bool) -> None:
    """Rebuild every derived table in memory and compare."""
    from kvsearch.app import study
    from kvsearch.errors import RunError

    found = {str(f): study.check(f) for f in folders}
    if as_json:
        print_json(found)
    else:
        for folder, tables in found.items():
            for name, same in tables.items():
                click.echo(f"{'ok     ' if same else 'DIFFERS'} {folder}/{name}")
    stale = [f"{f}/{n}" for f, tables in found.items() for n, same in tables.items() if not same]
    if stale:
        raise RunError(f"{', '.join(stale)} differ from the records; run `kvsearch study rebuild`")


@command.command("rebuild")
@FOLDERS
def rebuild(folders: tuple[Path, ...]) -> None:
    """Write every derived table anew from the records."""
    from kvsearch.app import study

    for folder in folders:
        for name in study.rebuild(folder):
            click.echo(f"{folder}/{name}")
