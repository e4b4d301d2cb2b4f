"""`kvsearch bench`."""

from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import BenchConfig
from kvsearch.options.to_click import options, output_options


@click.command("bench")
@click.argument("policy", metavar="NAME_OR_FILE")
@options(BenchConfig)
@output_options
def command(policy: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Decode tokens/s and bytes of a deployed policy against the full cache, in pairs."""
    from kvsearch.commands.bench import bench
    from kvsearch.report.terminal import bench_lines

    done = bench(policy, **given, progress=not quiet)
    answer(as_json, done.document(), bench_lines(*done))
