"""`kvsearch run`."""

from pathlib import Path
from typing import Any

import click

from kvsearch.cli.config import Configured, config_option
from kvsearch.cli.options import (
    PLACE,
    Count,
    batch_option,
    budget_options,
    heads_options,
    model_options,
    output_options,
    prompt_options,
    text_options,
)
from kvsearch.cli.output import loading, print_json
from kvsearch.policy_search.samplers import DEFAULT, NAMES
from kvsearch.workloads import See

NOTHING: dict[str, Any] = {"out": None, "interrupted": True, "front": [], "rows": [], "trials": []}


@click.command("run", cls=Configured)
@config_option
@budget_options("memory, everything counted", " [default: 256]")
@model_options
@text_options
@click.option(
    "--report-text",
    multiple=True,
    metavar="FILE",
    help="report on this text instead of on a part of --text",
)
@click.option(
    "--extra-text",
    multiple=True,
    metavar="FILE",
    help="check the recommended policy on this text as well; repeatable",
)
@click.option("--context", default=1536, show_default=True, help="tokens of a window")
@click.option(
    "--windows",
    default=16,
    show_default=True,
    help="windows that the search sees; fewer where the text is too short. Every policy starts on "
    "one, and the best few get more",
)
@click.option(
    "--report-windows",
    default=2,
    show_default=True,
    help="windows of the report; methods that are certainly behind are measured on fewer, and "
    "where these leave the headline undecided, its policies on up to eight times as many",
)
@prompt_options
@click.option(
    "--report-prompts",
    type=PLACE,
    multiple=True,
    metavar="FILE",
    help="report on these prompts instead of on a part of --prompts; once for each of those",
)
@click.option(
    "--items",
    default=16,
    show_default=True,
    help="contexts of each task or file that the search sees; the report has as many others, and "
    "up to four times as many where they leave the headline undecided",
)
@click.option("--score-from", type=int, help="first scored position [default: the budget in slots]")
@batch_option
@click.option(
    "--trials",
    type=Count(),
    default="auto",
    show_default=True,
    help="policies beyond the methods; auto: up to 12, while the search expects to gain by them",
)
@click.option(
    "--space", default="default", show_default=True, help="search space: name or YAML file"
)
@click.option(
    "--target",
    metavar="RUNTIME",
    help="search only what this runtime can execute, see `kvsearch targets`",
)
@click.option("--sampler", default=DEFAULT, show_default=True, help=", ".join(NAMES))
@click.option(
    "--objectives", default="nll,bytes", show_default=True, help="nll,bytes or nll,bytes,throughput"
)
@click.option(
    "--warm-start/--no-warm-start",
    default=True,
    show_default=True,
    help="start from the published methods",
)
@click.option(
    "--exclude-method",
    multiple=True,
    metavar="METHOD",
    help="leave a method out of the warm start; repeatable",
)
@click.option(
    "--all-methods",
    is_flag=True,
    help="compare with every published method, not only with those that were ever the best of "
    "their kind, and give each a row of the report, not only the best few on the search text",
)
@click.option(
    "--portfolio",
    metavar="FILE|none",
    default="default",
    show_default=True,
    help="policies of earlier searches to evaluate first",
)
@click.option("--seed", default=0, show_default=True, help="of the sampler")
@click.option(
    "--workers",
    type=int,
    help="evaluate in this many processes, one per GPU in turn; with --ray, actors; 0 is this "
    "process [default: on a CPU 2 to 4 for long runs, else 0; with --ray, one per GPU of the "
    "cluster, or 2]",
)
@click.option(
    "--gpus-per-evaluator",
    metavar="N",
    default=0,
    help="spread the model of each evaluator over N GPUs [default: 1, or all of --device]",
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
    help="tune runs the evaluations in Ray Tune: every policy on all windows, Tune's own tables",
)
@click.option(
    "--bench/--no-bench", default=True, show_default=True, help="measure decode speed at the end"
)
@click.option(
    "--minutes",
    type=float,
    help="stop after so many, with a report of what is known by then; the same command goes on",
)
@heads_options
@click.option("--out", type=PLACE, help="folder of the run [default: runs/...]")
@output_options
def command(
    budget_slots: float | None,
    budget_bytes: int | None,
    model: str,
    dtype: str,
    device: str,
    text: tuple[str, ...],
    dataset: str | None,
    report_text: tuple[str, ...],
    extra_text: tuple[str, ...],
    context: int,
    windows: int,
    report_windows: int,
    tasks: tuple[str, ...],
    prompts: tuple[Path, ...],
    report_prompts: tuple[Path, ...],
    see: See,
    items: int,
    score_from: int | None,
    batch: int | None,
    trials: int | None,
    space: str,
    target: str | None,
    sampler: str,
    objectives: str,
    warm_start: bool,
    exclude_method: tuple[str, ...],
    all_methods: bool,
    portfolio: str,
    seed: int,
    workers: int | None,
    gpus_per_evaluator: int,
    ray: str | None,
    engine: str,
    bench: bool,
    minutes: float | None,
    heads: Path | None,
    measure_heads: bool,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Search the policy space of a model and report the front.

    Running the same command again goes on where it stopped.
    """
    try:
        with loading(quiet):
            from kvsearch.app.search import search
            from kvsearch.report.terminal import closing

        found = search(
            model,
            text,
            budget_slots=budget_slots,
            budget_bytes=budget_bytes,
            dataset=dataset,
            report_text=report_text,
            extra_text=extra_text,
            context=context,
            windows=windows,
            report_windows=report_windows,
            tasks=tasks,
            prompts=prompts,
            report_prompts=report_prompts,
            see=see,
            items=items,
            score_from=score_from,
            trials=trials,
            space=space,
            target=target,
            sampler=sampler,
            objectives=objectives,
            warm_start=warm_start,
            exclude_method=exclude_method,
            all_methods=all_methods,
            portfolio=portfolio,
            seed=seed,
            workers=workers,
            gpus_per_evaluator=gpus_per_evaluator,
            ray=ray,
            engine=engine,
            bench=bench,
            minutes=minutes,
            heads=heads,
            measure_heads=measure_heads,
            dtype=dtype,
            device=device,
            batch=batch,
            out=out,
            progress=not quiet,
        )
    except KeyboardInterrupt as stopped:
        begun: Any = stopped if hasattr(stopped, "trials") else None  # `Interrupted`, in a folder
        if as_json:
            print_json(begun.document() if begun else NOTHING)
        elif begun:
            click.echo(closing(begun.summary, begun.folder))
        raise
    if as_json:
        print_json(found.document())
    else:
        click.echo(closing(found.summary, found.folder))
