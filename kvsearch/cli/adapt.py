"""`kvsearch adapt`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvsearch.cli.options import (
    PLACE,
    budget_options,
    model_options,
    output_options,
    prompt_option,
    text_options,
)
from kvsearch.cli.output import answer
from kvsearch.errors import KvsearchError

if TYPE_CHECKING:
    from kvsearch.app.adapt_report import Adapted
    from kvsearch.app.learn import Fitted

NOT_OF_RULES = (
    "minutes", "batch", "accumulate", "lora", "rank", "lr", "warmup", "save_every", "channels_only",
    "prompt", "seed",
)  # fmt: skip


@click.command("adapt")
@click.argument("policy", metavar="[NAME_OR_FILE]", required=False)
@click.option("--rule", metavar="NAME", help="fit the weights of a rule instead: kvzap")
@click.option("--out", type=PLACE, required=True, help="folder of the trained model")
@model_options
@text_options
@click.option(
    "--held-out",
    multiple=True,
    metavar="FILE",
    help="text to measure on; repeatable [default: the last tenth of the text]",
)
@budget_options("size a method to this")
@click.option("--steps", type=int, help="optimizer steps [default: 200, or what --minutes allow]")
@click.option("--minutes", type=float, help="of training, at most")
@click.option("--context", default=512, show_default=True, help="tokens of a window")
@click.option("--windows", type=int, help="held-out windows [default: 8, or as many as there are]")
@click.option("--batch", default=1, show_default=True, help="windows per forward pass")
@click.option("--accumulate", default=8, show_default=True, help="forward passes per step")
@click.option(
    "--lora/--no-lora",
    default=None,
    help="low-rank additions or all weights [default: additions where channels are gone]",
)
@click.option("--rank", default=8, show_default=True, help="of the additions")
@click.option("--lr", type=float, help="learning rate [default: 1e-4 with LoRA, else 2e-5]")
@click.option("--warmup", default=20, show_default=True, help="steps before the full rate")
@click.option("--save-every", default=50, show_default=True, help="steps between checkpoints")
@click.option(
    "--channels-only",
    is_flag=True,
    help="train what channels leave, under full attention, whatever the policy evicts",
)
@prompt_option
@click.option("--seed", default=0, show_default=True, help="of the order of windows")
@output_options
def command(policy: str | None, rule: str | None, as_json: bool, quiet: bool, **given: Any) -> None:
    """Train a model to live with a policy, or without the channels it removes.

    The folder is a Hugging Face checkpoint with the policy for it in policy.json. The same command
    again goes on from the newest checkpoint.

    With --rule, the weights of a rule are fitted to the model, which stays as it is: --steps is the
    number of contexts that are read.
    """
    if (policy is None) == (rule is None):
        raise KvsearchError("name a method or a policy file to train for, or a rule with --rule")
    done: Adapted | Fitted
    if rule is not None:
        from kvsearch.app.learn import learn

        for name in NOT_OF_RULES:
            source = click.get_current_context().get_parameter_source(name)
            if source is not click.core.ParameterSource.DEFAULT:
                raise KvsearchError(
                    f"--{name.replace('_', '-')} does not go with --rule {rule}, whose weights "
                    "have a solution in closed form; leave it out"
                )
            del given[name]
        done = learn(rule, **given, progress=not quiet)
    else:
        from kvsearch.app.adapt import adapt

        assert policy is not None
        done = adapt(policy, **given, progress=not quiet)
    answer(as_json, asdict(done), done.table())
