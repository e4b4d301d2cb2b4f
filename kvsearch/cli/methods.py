"""`kvsearch methods`."""

import click

from kvsearch.cli.output import answer
from kvsearch.options.to_click import output_options


@click.command("methods")
@output_options
def command(as_json: bool, quiet: bool) -> None:
    """List the published methods and combinations made by hand as points of the space."""
    from kvsearch.commands.tables import methods

    found = methods()
    names = ("kind", "about", "knobs", "baseline")
    lines = []
    for name, m in found.items():
        knobs = " ".join(
            f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in m.knobs.items()
        )
        lines += [f"{name:<20} {m.kind:<10} {m.about}", f"{'':<31} {knobs or '(defaults)'}"]
    document = {name: {k: getattr(m, k) for k in names} for name, m in found.items()}
    answer(as_json, document, "\n".join(lines))
