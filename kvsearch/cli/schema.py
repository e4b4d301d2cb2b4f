"""`kvsearch schema`."""

import click

from kvsearch.cli.output import print_json


@click.command("schema")
def command() -> None:
    """Print the JSON schema of a policy file."""
    from kvsearch.policy import Policy

    print_json(Policy.model_json_schema(by_alias=True), indent=2)
