"""`kvsearch study check` and `kvsearch study rebuild`."""

from pathlib import Path

import click

from kvsearch.cli.output import print_json
from kvsearch.options.to_click import output_options

FOLDERS = click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True)
)

WORDS = {True: "ok     ", False: "DIFFERS", None: "ABSENT "}


@click.group("study")
def command() -> None:
    """Kept studies: do their tables follow from their records?"""


@command.command("check")
@FOLDERS
@output_options
def check(folders: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Rebuild every derived table in memory and compare."""
    from kvsearch.commands import study
    from kvsearch.errors import KvsearchError, RunError

    def show(line: str) -> None:
        if not as_json:
            click.echo(line)

    found: dict[str, dict[str, bool | str | None]] = {}
    wrong, stale, absent = [], [], []
    for folder in folders:
        try:
            tables = study.check(folder)
        except KvsearchError as e:  # the other studies are checked all the same
            wrong.append(str(e))
            found[str(folder)] = {"error": str(e)}
            show(f"FAILED  {folder}")
            continue
        found[str(folder)] = {**tables}
        for name, same in tables.items():
            show(f"{WORDS[same]} {folder}/{name}")
        stale += [f"{folder}/{name}" for name, same in tables.items() if same is False]
        absent += [f"{folder}/{name}" for name, same in tables.items() if same is None]
    if as_json:
        print_json(found)
    if stale:
        wrong.append(f"{', '.join(stale)} differ from the records; run `kvsearch study rebuild`")
    if absent:
        wrong.append(f"not there: {', '.join(absent)}; `kvsearch study rebuild` writes it")
    if wrong:
        raise RunError("; ".join(wrong))


@command.command("rebuild")
@FOLDERS
@output_options
def rebuild(folders: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Write every derived table anew from the records."""
    from kvsearch.commands import study
    from kvsearch.errors import KvsearchError, RunError

    files, wrong = [], []
    for folder in folders:
        try:
            files += [f"{folder}/{name}" for name in study.rebuild(folder)]
        except KvsearchError as e:  # the other studies are rebuilt all the same
            wrong.append(str(e))
    if as_json:
        print_json({"files": files})
    for file in () if as_json else files:
        click.echo(file)
    if wrong:
        raise RunError("; ".join(wrong))
