"""`kvsearch targets`."""

from dataclasses import asdict

import click

from kvsearch.cli.output import answer
from kvsearch.options.to_click import output_options


@click.command("targets")
@click.option(
    "--install", metavar="TARGET", help="install a runtime that --verify runs, on its own"
)
@output_options
def command(install: str | None, as_json: bool, quiet: bool) -> None:
    """List the runtimes that policies are exported to, and how far that is proven."""
    from kvsearch.commands import tables
    from kvsearch.exporters import PROOFS, environments, find

    if install is not None:
        from kvsearch.session.progress import Shown

        python = environments.install(find(install), Shown(quiet=quiet).say)
        answer(as_json, {"python": str(python)}, str(python))
        return
    found = tables.targets()
    lines = []
    for t in found:
        here = f"{t.installed} is installed" if t.installed else "not installed"
        lines.append(f"{t.name:<18} {t.runtime} {t.version}, proof {t.proof}, {here}")
        lines.append(f"{'':<18} {t.knobs}")
    lines += ["", *(f"{name:<18} {about}" for name, about in PROOFS.items())]
    answer(as_json, [asdict(t) for t in found], "\n".join(lines))
