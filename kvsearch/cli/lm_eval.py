"""`kvsearch lm-eval`."""

import sys

import click

from kvsearch.errors import KvsearchError

SUBCOMMANDS = ("run", "ls", "validate")


@click.command(
    "lm-eval",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="ARGUMENTS..."
)
def command(arguments: tuple[str, ...]) -> None:
    """Run tasks of lm-evaluation-harness on a model whose cache follows a policy.

    All ARGUMENTS go on to lm-eval, whose default model is `kvsearch` here; `kvsearch lm-eval run
    --help` lists them. Further --model_args are policy=FILE, or policy=METHOD with budget=SLOTS or
    budget_bytes=SIZE; without a policy it is the full cache.

    \b
    kvsearch lm-eval --model_args pretrained=M,policy=best.json --tasks arc_easy
    """
    import kvsearch.lm_eval  # registers the model

    given = list(arguments) if arguments[0] in SUBCOMMANDS else ["run", *arguments]
    if given[0] == "run":
        given[1:1] = ["--model", kvsearch.lm_eval.NAME]
    before, sys.argv = sys.argv, ["kvsearch lm-eval", *given]
    try:
        kvsearch.lm_eval.cli_evaluate()
    except KvsearchError:
        raise
    except (ValueError, AssertionError) as error:  # such as that of an unknown task
        raise KvsearchError(f"lm-eval: {str(error) or 'it stops at an assertion'}") from error
    finally:
        sys.argv = before
