"""`kvsearch methods`."""

import click

from kvsearch.cli.options import output_options
from kvsearch.cli.output import print_json


@click.command("methods")
@output_options
def command(as_json: bool, quiet: bool) -> None:
    """List the published methods and combinations made by hand as points of the space."""
    from kvsearch.app.tables import methods

    found = methods()
    if as_json:
        print_json(
            {
                name: {"kind": m.kind, "about": m.about, "knobs": m.knobs, "baseline": m.baseline}
                for name, m in found.items()
            }
        )
        return
    for name, m in found.items():
        knobs = " ".join(
            f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in m.knobs.items()
        )
        click.echo(f"{name:<20} {m.kind:<10} {m.about}\n{'':<20} {'':<10} {knobs or '(defaults)'}")
