"""`kvsearch eval`."""

from pathlib import Path
from typing import Any

import click

from kvsearch.cli.options import (
    PLACE,
    batch_option,
    budget_options,
    heads_options,
    model_options,
    output_options,
    prompt_options,
    text_options,
)
from kvsearch.cli.output import print_json
from kvsearch.errors import KvsearchError


@click.command("eval")
@click.argument("policies", nargs=-1, required=True, metavar="NAME_OR_FILE...")
@budget_options("size methods to this")
@model_options
@text_options
@click.option("--tokens", type=int, help="tokens in all [default: windows x context]")
@click.option("--context", type=int, help="tokens of a window [default: 2048, or --tokens if less]")
@click.option("--windows", type=int, help="windows [default: 1, or tokens / context]")
@click.option("--score-from", type=int, help="first scored position [default: the budget in slots]")
@click.option(
    "--prompt",
    default=0,
    show_default=True,
    help="tokens that arrive in one call, for policies triggered by a prompt; not scored",
)
@prompt_options
@click.option("--items", default=25, show_default=True, help="contexts of a task")
@heads_options
@batch_option
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
def command(
    policies: tuple[str, ...],
    budget_slots: float | None,
    budget_bytes: int | None,
    model: str,
    dtype: str,
    device: str,
    text: tuple[str, ...],
    dataset: str | None,
    tokens: int | None,
    context: int | None,
    windows: int | None,
    score_from: int | None,
    prompt: int,
    tasks: tuple[str, ...],
    prompts: tuple[Path, ...],
    see: str,
    items: int,
    heads: Path | None,
    measure_heads: bool,
    batch: int | None,
    nll_out: Path | None,
    kvpress_out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure methods and policy files against the full cache: on a text, or on prompts."""
    if tasks or prompts:
        _on_prompts(
            policies, model, tasks, prompts, as_json, progress=not quiet, see=see, items=items,
            text=text, budget_slots=budget_slots, budget_bytes=budget_bytes, heads=heads,
            measure_heads=measure_heads, dtype=dtype, device=device, kvpress_out=kvpress_out,
        )  # fmt: skip
        return
    if kvpress_out is not None:
        raise KvsearchError("--kvpress-out is for answers to prompts: give --task or --prompts")
    from kvsearch.app.evaluate import NotWritten, evaluate
    from kvsearch.report.terminal import results_table

    failed: NotWritten | None = None
    try:
        found = evaluate(
            policies,
            model,
            text,
            budget_slots=budget_slots,
            budget_bytes=budget_bytes,
            dataset=dataset,
            tokens=tokens,
            context=context,
            windows=windows,
            score_from=score_from,
            prompt=prompt,
            heads=heads,
            measure_heads=measure_heads,
            dtype=dtype,
            device=device,
            batch=batch,
            nll_out=nll_out,
            progress=not quiet,
        )
    except NotWritten as e:
        found, failed = e.result, e
    document = found.document()
    if as_json:
        print_json(document)
    else:
        click.echo(results_table(document))
    if failed is not None:
        raise failed


def _on_prompts(
    policies: tuple[str, ...],
    model: str,
    tasks: tuple[str, ...],
    prompts: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    from kvsearch.app.prompts import evaluate_prompts
    from kvsearch.report.terminal import answers_table

    document = evaluate_prompts(policies, model, tasks=tasks, prompts=prompts, **options).document()
    if as_json:
        print_json(document)
    else:
        click.echo(answers_table(document))
        for folder in document["folders"]:
            click.echo(folder)
