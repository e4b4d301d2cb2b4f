"""`kvsearch prune`."""

from dataclasses import asdict
from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import PruneConfig
from kvsearch.options.to_click import options, output_options


@click.command("prune")
@click.argument("policy", metavar="NAME_OR_FILE")
@options(PruneConfig)
@output_options
def command(policy: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Write a smaller model without the channels that a policy removes.

    The folder is a Hugging Face checkpoint; policy.json in it is the rest of the policy.
    """
    from kvsearch.commands.prune import prune

    done = prune(policy, **given, progress=not quiet)
    gone = f", {len(done.removed)} layers without attention" if done.removed else ""
    text = (
        f"{done.folder}: {done.parameters:,} of {done.parameters_before:,} parameters, "
        f"{done.token_bytes:,} of {done.token_bytes_before:,} bytes of keys and values a token"
        f"{gone}"
    )
    answer(as_json, asdict(done), text)
