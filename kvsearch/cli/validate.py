"""`kvsearch validate`."""

from pathlib import Path

import click

from kvsearch.cli.output import print_json
from kvsearch.options.to_click import PLACE, output_options


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=PLACE)
@output_options
def command(files: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """Check policy (.json) and search space (.yaml) files; of each the first mistake is named."""
    from kvsearch.errors import KvsearchError

    found, wrong = [], []
    for file in files:
        kind = "space" if file.suffix in (".yaml", ".yml") else "policy"
        try:
            digest = _digest(file, kind)
        except KvsearchError as e:  # the other files are checked all the same
            wrong.append(str(e))
            found.append({"file": str(file), "kind": kind, "error": str(e)})
            continue
        found.append({"file": str(file), "kind": kind, "digest": digest})
        if not as_json:
            click.echo(f"{file}: a valid {kind}, {digest}")
    if as_json:
        print_json(found)
    if wrong:  # each is one line, and none may be cut because of the others
        click.echo(f"kvsearch: {'; '.join(wrong)}", err=True)
        raise click.exceptions.Exit(2)


def _digest(file: Path, kind: str) -> str:
    """The digest of a space or policy file, if it is valid as far as that shows without a model."""
    from kvsearch.errors import PolicyError
    from kvsearch.policy import Policy, require_slots
    from kvsearch.policy_space import load

    if kind == "space":
        return load(str(file)).digest
    policy = Policy.from_json(file)
    try:
        require_slots(policy)
        if policy.rule is not None and policy.rule.files:
            from kvsearch.models.learned import beside  # loads torch

            beside(policy)
    except PolicyError as e:
        raise PolicyError(f"{file}: {e}") from e
    return policy.fingerprint()
