"""`kvsearch eval`."""

from typing import Any

import click
from click.core import ParameterSource

from kvsearch.cli.output import answer
from kvsearch.config.commands import EvaluateConfig, EvaluatePromptsConfig
from kvsearch.config.to_click import options, output_options, shown
from kvsearch.errors import KvsearchError


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@options(EvaluateConfig, EvaluatePromptsConfig)
@output_options
def command(policies: tuple[str, ...], as_json: bool, quiet: bool, **given: Any) -> None:
    """Measure methods and policy files against the full cache: on a text, or on prompts."""
    on_prompts = bool(given["tasks"] or given["prompts"])
    text, prompts = ([f.name for f in shown(c)] for c in (EvaluateConfig, EvaluatePromptsConfig))
    for name in [n for n in given if n not in (prompts if on_prompts else text)]:
        source = click.get_current_context().get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE:
            only = "a text: leave out" if on_prompts else "answers to prompts: give"
            raise KvsearchError(f"--{name.replace('_', '-')} is for {only} --task or --prompts")
        del given[name]
    if on_prompts:
        from kvsearch.commands.prompts import evaluate_prompts
        from kvsearch.report.terminal import answers_table

        document = evaluate_prompts(policies, **given, progress=not quiet).document()
        answer(as_json, document, "\n".join([answers_table(document), *document["folders"]]))
        return
    from kvsearch.commands.evaluate import EvaluateResult, NotWritten, evaluate
    from kvsearch.report.terminal import results_table

    def show(found: EvaluateResult) -> None:
        document = found.document()
        answer(as_json, document, results_table(document))

    try:
        show(evaluate(policies, **given, progress=not quiet))
    except NotWritten as e:
        show(e.result)
        raise
