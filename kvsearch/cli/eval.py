"""`kvsearch eval`."""

from typing import Any

import click

from kvsearch.cli.output import answer
from kvsearch.config.commands import EvaluateConfig
from kvsearch.config.to_click import options, output_options


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@options(EvaluateConfig)
@output_options
def command(policies: tuple[str, ...], as_json: bool, quiet: bool, **given: Any) -> None:
    """Measure methods and policy files against the full cache: on a text, on prompts, or both."""
    from kvsearch.commands.evaluate import evaluate
    from kvsearch.commands.evaluated import EvaluateResult, NotWritten
    from kvsearch.report.terminal import results_table

    def show(found: EvaluateResult) -> None:
        document = found.document()
        answer(as_json, document, "\n".join([results_table(document), *document["folders"]]))

    try:
        show(evaluate(policies, **given, progress=not quiet))
    except NotWritten as e:
        show(e.result)
        raise
