"""`kvsearch export`."""

import json
from pathlib import Path

import click

from kvsearch.cli.options import output_options


@click.command("export")
@click.argument("policy", type=click.Path(path_type=Path))
@click.option("--to", "target", default="transformers", show_default=True, help="runtime")
@click.option("--out", type=click.Path(path_type=Path), help="folder [default: beside the policy]")
@output_options
def command(policy: Path, target: str, out: Path | None, as_json: bool, quiet: bool) -> None:
    """Write what a runtime needs to run POLICY."""
    from kvsearch.export import export
    from kvsearch.policy import Policy

    folder = out or policy.with_name(f"{policy.stem}-{target}")
    files = [str(f) for f in export(Policy.from_json(policy), target, folder)]
    click.echo(json.dumps({"target": target, "files": files}) if as_json else "\n".join(files))
