"""`kvsearch run`."""

import json
from pathlib import Path
from typing import Any

import click

from kvsearch.cli.options import model_options, output_options, text_options
from kvsearch.search.samplers import DEFAULT, NAMES


@click.command("run")
@click.option(
    "--budget",
    default=256.0,
    show_default=True,
    help="memory, in fp16 slots per layer; everything is counted",
)
@model_options
@text_options
@click.option(
    "--report-text",
    "report_files",
    multiple=True,
    metavar="FILE",
    help="report on this text instead of on a part of --text",
)
@click.option("--also", multiple=True, metavar="FILE", help="check the answer on this text as well")
@click.option("--context", default=1536, show_default=True, help="tokens of a window")
@click.option("--windows", default=1, show_default=True, help="windows that the search sees")
@click.option("--report-windows", default=1, show_default=True, help="windows of the report")
@click.option("--score-from", type=int, help="first scored position [default: the budget]")
@click.option("--trials", default=6, show_default=True, help="policies beyond the methods")
@click.option(
    "--space", default="default", show_default=True, help="search space: name or YAML file"
)
@click.option("--sampler", default=DEFAULT, show_default=True, help=", ".join(NAMES))
@click.option(
    "--objectives", default="nll,bytes", show_default=True, help="nll,bytes or nll,bytes,throughput"
)
@click.option("--cold", is_flag=True, help="do not start from the published methods")
@click.option("--without", multiple=True, metavar="METHOD", help="leave a method out of the start")
@click.option("--no-race", is_flag=True, help="evaluate every proposal in full")
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--workers",
    default=0,
    help="evaluate in this many processes, one per GPU in turn; with --ray, actors "
    "[default: in this process; with --ray, one per GPU of the cluster, or 2]",
)
@click.option(
    "--ray",
    metavar="ADDRESS|local",
    help="evaluate in actors of a Ray cluster, or of a local Ray started for this run",
)
@click.option(
    "--engine",
    type=click.Choice(["kvsearch", "tune"]),
    default="kvsearch",
    show_default=True,
    help="tune runs the evaluations in Ray Tune: no races, and Tune's own tables",
)
@click.option("--no-bench", is_flag=True, help="skip the decode speed")
@click.option(
    "--out", type=click.Path(path_type=Path), help="folder of the run [default: runs/...]"
)
@output_options
def command(
    files: tuple[str, ...],
    dataset: str | None,
    report_files: tuple[str, ...],
    context: int,
    windows: int,
    report_windows: int,
    no_bench: bool,
    cold: bool,
    no_race: bool,
    objectives: str,
    as_json: bool,
    quiet: bool,
    **rest: Any,
) -> None:
    """Search the policy space of a model and report the front.

    Running the same command again goes on where it stopped.
    """
    from kvsearch.app.inputs import TextOptions
    from kvsearch.app.progress import Shown
    from kvsearch.app.run import Run, RunOptions
    from kvsearch.records import plain
    from kvsearch.report.terminal import closing, measured_so_far

    text = TextOptions(files, dataset, report_files, context, windows, report_windows)
    options = RunOptions(
        text=text,
        bench=not no_bench,
        warm=not cold,
        racing=not no_race,
        objectives=tuple(objectives.split(",")),
        **rest,
    )
    run = Run(options, Shown(quiet))
    try:
        summary = run.go()
    except KeyboardInterrupt:
        if not as_json:
            click.echo(measured_so_far(run.so_far()))
        raise
    if as_json:
        click.echo(json.dumps({"out": str(run.folder.path), **plain(summary)}))
    else:
        click.echo(closing(summary, run.folder.path))
