"""`kvsearch eval`."""

from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import EvaluateConfig
from kvsearch.options.to_click import options, output_options

NOT_HELD = 3


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@options(EvaluateConfig)
@click.option(
    "--max-drop",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="exit with 3 if a policy loses more: of perplexity on a text, of the context on prompts",
)
@output_options
def command(
    policies: tuple[str, ...], as_json: bool, quiet: bool, max_drop: float | None, **given: Any
) -> None:
    """Measure methods and policy files against the full cache: on a text, on prompts, or both."""
    from kvsearch.commands.evaluate import evaluate
    from kvsearch.commands.evaluated import EvaluateResult, NotWritten
    from kvsearch.report.terminal import results_table

    def show(found: EvaluateResult) -> None:
        document = found.document()
        answer(as_json, document, "\n".join([results_table(document), *document["folders"]]))

    try:
        found = evaluate(policies, **given, progress=not quiet)
        show(found)
    except NotWritten as e:
        show(e.result)
        raise
    if max_drop is not None and (more := found.beyond(max_drop)):
        click.echo(f"kvsearch: {'; '.join(more)}: more than {max_drop:g} %", err=True)
        raise SystemExit(NOT_HELD)
