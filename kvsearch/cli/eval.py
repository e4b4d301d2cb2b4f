"""`kvsearch eval`."""

from typing import Any

import click
from click.core import ParameterSource

from kvsearch.cli.options import (
    PLACE,
    budget_options,
    heads_options,
    model_options,
    options,
    output_options,
    prompt_option,
    prompt_options,
    text_options,
)
from kvsearch.cli.output import answer
from kvsearch.errors import KvsearchError

TEXT = ("dataset", "tokens", "context", "windows", "score_from", "prompt", "batch", "nll_out")
PROMPTS = ("tasks", "prompts", "see", "items", "kvpress_out")


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@budget_options("size methods to this")
@model_options
@text_options
@click.option("--tokens", type=int, help="tokens in all [default: windows x context]")
@click.option("--context", type=int, help="tokens of a window [default: 2048, or --tokens if less]")
@click.option("--windows", type=int, help="windows [default: 1, or tokens / context]")
@click.option("--score-from", type=int, help="first scored position [default: the budget in slots]")
@prompt_option
@prompt_options
@options("items", items={"default": 25, "help": "contexts of a task"})
@heads_options
@options("batch")
@click.option(
    "--nll-out",
    type=PLACE,
    metavar="FILE.parquet",
    help="per-token NLL: policy, window, pos, token, nll",
)
@click.option(
    "--kvpress-out",
    type=PLACE,
    metavar="DIR",
    help="also generate the answers to prompts, and write them below DIR as kvpress does",
)
@output_options
def command(policies: tuple[str, ...], as_json: bool, quiet: bool, **given: Any) -> None:
    """Measure methods and policy files against the full cache: on a text, or on prompts."""
    on_prompts = bool(given["tasks"] or given["prompts"])
    for name in TEXT if on_prompts else PROMPTS:
        source = click.get_current_context().get_parameter_source(name)
        if source is ParameterSource.COMMANDLINE and name not in ("tasks", "prompts"):
            text, answers = "a text: leave out", "answers to prompts: give"
            only = f"{text if on_prompts else answers} --task or --prompts"
            raise KvsearchError(f"--{name.replace('_', '-')} is for {only}")
        del given[name]
    if on_prompts:
        from kvsearch.app.prompts import evaluate_prompts
        from kvsearch.report.terminal import answers_table

        document = evaluate_prompts(policies, **given, progress=not quiet).document()
        text = "\n".join([answers_table(document), *document["folders"]])
        answer(as_json, document, text)
        return
    from kvsearch.app.evaluate import EvaluateResult, NotWritten, evaluate
    from kvsearch.report.terminal import results_table

    def show(found: EvaluateResult) -> None:
        document = found.document()
        answer(as_json, document, results_table(document))

    try:
        show(evaluate(policies, **given, progress=not quiet))
    except NotWritten as e:
        show(e.result)
        raise
