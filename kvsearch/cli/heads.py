"""`kvsearch heads`."""

import json
from pathlib import Path

import click

from kvsearch.cli.options import PLACE, model_options, output_options
from kvsearch.cli.output import print_json


@click.command("heads")
@model_options
@click.option("-o", "--out", type=PLACE, metavar="FILE", help="write the losses to this file")
@click.option(
    "--measure-heads", is_flag=True, help="measure, even where they are shipped or kept on disk"
)
@output_options
def command(
    model: str,
    dtype: str,
    device: str,
    out: Path | None,
    measure_heads: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure what every KV head of a model loses in a small cache, once per model.

    Budgets per KV head follow it. The file that `-o` writes is read by `--heads` of run, eval and
    bench, here or on another machine.
    """
    from kvsearch.app.heads import heads
    from kvsearch.report.terminal import head_lines

    found = heads(
        model, out=out, measure_heads=measure_heads, dtype=dtype, device=device, progress=not quiet
    )
    if as_json:
        print_json(json.loads(found.text))
    else:
        click.echo(head_lines(found.losses, found.where))
