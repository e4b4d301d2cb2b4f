"""`kvsearch schema`."""

import click

from kvsearch.cli.output import print_json
from kvsearch.options.to_click import output_options


@click.command("schema")
@output_options
def command(as_json: bool, quiet: bool) -> None:
    """Print the JSON schema of a policy file, with and without --json."""
    from kvsearch.policy import Policy

    print_json(Policy.model_json_schema(by_alias=True), indent=2)
