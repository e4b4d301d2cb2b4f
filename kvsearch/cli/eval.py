"""`kvsearch eval`."""

import json
from pathlib import Path
from typing import Any

import click

from kvsearch.cli.options import model_options, output_options, text_options


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@click.option("--budget", type=float, help="size methods to this many fp16 slots per layer")
@model_options
@text_options
@click.option("--tokens", type=int, help="tokens in all [default: windows x context]")
@click.option("--context", type=int, help="tokens of a window [default: 2048, or --tokens if less]")
@click.option("--windows", type=int, help="windows [default: 1, or tokens / context]")
@click.option("--score-from", type=int, help="first scored position [default: the budget]")
@click.option(
    "--prompt",
    default=0,
    show_default=True,
    help="tokens that arrive in one call, for policies triggered by a prompt",
)
@click.option(
    "--nll-out",
    type=click.Path(path_type=Path),
    metavar="FILE.parquet",
    help="per-token NLL: policy, window, pos, token, nll",
)
@output_options
def command(
    tokens: int | None,
    context: int | None,
    windows: int | None,
    as_json: bool,
    quiet: bool,
    **rest: Any,
) -> None:
    """Measure methods and policy files against the full cache, paired token by token."""
    from kvsearch.app.evaluate import EvalOptions, run
    from kvsearch.app.progress import Shown
    from kvsearch.report.terminal import results_table

    if context is None:
        context = min(tokens or 2048, 8192) if windows is None else (tokens or 2048) // windows
    if windows is None:
        windows = max(1, (tokens or context) // context)
    document = run(EvalOptions(context=context, windows=windows, **rest), Shown(quiet))
    click.echo(json.dumps(document) if as_json else results_table(document))
