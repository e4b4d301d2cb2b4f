"""`kvsearch bench`."""

import json
from dataclasses import asdict
from typing import Any

import click

from kvsearch.cli.options import model_options, output_options, text_options


@click.command("bench")
@click.argument("policy", metavar="NAME_OR_FILE")
@model_options
@text_options
@click.option("--budget", type=float, help="size a method to this many fp16 slots per layer")
@click.option("--context", default=2048, show_default=True, help="tokens in the cache at the start")
@click.option("--pairs", default=5, show_default=True, help="timed pairs")
@click.option("--steps", default=16, show_default=True, help="tokens decoded per half of a pair")
@output_options
def command(as_json: bool, quiet: bool, **rest: Any) -> None:
    """Decode tokens/s and bytes of a deployed policy against the full cache, in pairs."""
    from kvsearch.app.bench import run
    from kvsearch.app.progress import Shown
    from kvsearch.report.terminal import bench_lines

    name, result = run(Shown(quiet), **rest)
    if as_json:
        click.echo(json.dumps({"policy": name, **asdict(result)}))
    else:
        click.echo(bench_lines(name, result))
