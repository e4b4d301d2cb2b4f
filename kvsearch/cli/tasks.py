"""`kvsearch tasks`."""

import click

from kvsearch.cli.options import output_options
from kvsearch.cli.output import print_json


@click.command("tasks")
@output_options
def command(as_json: bool, quiet: bool) -> None:
    """List the tasks that `kvsearch eval --task` measures answers on."""
    from importlib.util import find_spec

    from kvsearch.workloads import TASKS

    rows = {
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
    for name, row in rows.items():
        options = ", ".join(f"{k}={v}" for k, v in TASKS[name].options.items())
        needs = "" if row["there"] else f"  (needs {TASKS[name].wheel})"
        click.echo(f"{name:<10} {TASKS[name].about}{needs}")
        click.echo(f"{'':<10} {options}, tokens={TASKS[name].tokens}")
