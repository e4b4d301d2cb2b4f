"""`kvsearch prune`."""

from dataclasses import asdict
from pathlib import Path

import click

from kvsearch.cli.options import PLACE, model_options, output_options, text_options
from kvsearch.cli.output import print_json


@click.command("prune")
@click.argument("policy", metavar="NAME_OR_FILE")
@click.option("--out", type=PLACE, required=True, help="folder of the smaller model")
@model_options
@text_options
@output_options
def command(
    policy: str,
    out: Path,
    model: str,
    dtype: str,
    device: str,
    text: tuple[str, ...],
    dataset: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write a smaller model without the channels that a policy removes.

    The folder is a Hugging Face checkpoint; policy.json in it is the rest of the policy.
    """
    from kvsearch.app.prune import prune

    done = prune(
        policy,
        model,
        out,
        text=text,
        dataset=dataset,
        dtype=dtype,
        device=device,
        progress=not quiet,
    )
    if as_json:
        print_json(asdict(done))
        return
    gone = f", {len(done.removed)} layers without attention" if done.removed else ""
    click.echo(
        f"{done.folder}: {done.parameters:,} of {done.parameters_before:,} parameters, "
        f"{done.token_bytes:,} of {done.token_bytes_before:,} bytes of keys and values a token"
        f"{gone}"
    )
