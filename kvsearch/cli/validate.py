"""`kvsearch validate`."""

from pathlib import Path

import click

from kvsearch.cli.options import output_options
from kvsearch.cli.output import print_json


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_options
def command(files: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Check policy (.json) and search space (.yaml) files; the first mistake is named."""
    from kvsearch.policy import Policy
    from kvsearch.space import load

    found = []
    for file in files:
        if file.suffix in (".yaml", ".yml"):
            found.append({"file": str(file), "kind": "space", "digest": load(str(file)).digest})
        else:
            policy = Policy.from_json(file)
            found.append({"file": str(file), "kind": "policy", "digest": policy.fingerprint()})
    if as_json:
        print_json(found)
    else:
        for f in found:
            click.echo(f"{f['file']}: a valid {f['kind']}, {f['digest']}")
