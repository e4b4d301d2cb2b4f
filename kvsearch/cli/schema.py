"""`kvsearch schema`."""

import json

import click


@click.command("schema")
def command() -> None:
    """Print the JSON schema of a policy file."""
    from kvsearch.policy import Policy

    click.echo(json.dumps(Policy.model_json_schema(by_alias=True), indent=2))
