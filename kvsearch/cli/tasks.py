"""`kvsearch tasks`."""

from typing import Any

import click

from kvsearch.cli.options import output_options
from kvsearch.cli.output import print_json


@click.command("tasks")
@output_options
def command(as_json: bool, quiet: bool) -> None:
    """List the tasks that `kvsearch eval --task` measures answers on."""
    from importlib.util import find_spec

    from kvsearch.workloads import TASKS

    rows: dict[str, dict[str, Any]] = {
        name: {
            "about": task.about,
            "options": {**task.options, "tokens": task.tokens},
            "package": task.package,
            "there": task.package is None or find_spec(task.package) is not None,
        }
        for name, task in TASKS.items()
    }
    if as_json:
        print_json(rows)
        return
    width = max(map(len, rows))
    for name, row in rows.items():
        options = ", ".join(f"{k}={v}" for k, v in row["options"].items())
        needs = "" if row["there"] else f"  (needs {TASKS[name].wheel})"
        click.echo(f"{name:<{width}}  {row['about']}{needs}")
        click.echo(f"{'':<{width}}  {options}")
