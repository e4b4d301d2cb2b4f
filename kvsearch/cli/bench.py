"""`kvsearch bench`."""

from typing import Any

import click

from kvsearch.cli.options import (
    budget_options,
    heads_options,
    model_options,
    output_options,
    text_options,
)
from kvsearch.cli.output import answer


@click.command("bench")
@click.argument("policy", metavar="NAME_OR_FILE")
@model_options
@text_options
@budget_options("size a method to this")
@heads_options
@click.option("--context", default=2048, show_default=True, help="tokens in the cache at the start")
@click.option("--pairs", default=5, show_default=True, help="timed pairs")
@click.option("--steps", default=16, show_default=True, help="tokens decoded per half of a pair")
@click.option(
    "--cuda-graphs", is_flag=True, help="on a GPU: decode with replays of CUDA graphs, both caches"
)
@output_options
def command(policy: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Decode tokens/s and bytes of a deployed policy against the full cache, in pairs."""
    from kvsearch.app.bench import bench
    from kvsearch.report.terminal import bench_lines

    done = bench(policy, **given, progress=not quiet)
    answer(as_json, done.document(), bench_lines(*done))
