"""`kvsearch adapt`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from kvsearch.cli.output import answer
from kvsearch.errors import KvsearchError
from kvsearch.options.other_commands import AdaptConfig, LearnConfig
from kvsearch.options.to_click import options, output_options, shown

if TYPE_CHECKING:
    from kvsearch.commands.adapt_report import Adapted
    from kvsearch.commands.learn import Fitted


@click.command("adapt")
@click.argument("policy", metavar="[NAME_OR_FILE]", required=False)
@click.option("--rule", metavar="NAME", help="fit the weights of a rule instead: kvzap")
@options(AdaptConfig)
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
        from kvsearch.commands.learn import learn

        own = {f.name for f in shown(LearnConfig)}
        for name in [n for n in given if n not in own]:
            source = click.get_current_context().get_parameter_source(name)
            if source is not click.core.ParameterSource.DEFAULT:
                raise KvsearchError(
                    f"--{name.replace('_', '-')} does not go with --rule {rule}, whose weights "
                    "have a solution in closed form; leave it out"
                )
            del given[name]
        done = learn(rule, **given, progress=not quiet)
    else:
        from kvsearch.commands.adapt import adapt

        assert policy is not None
        done = adapt(policy, **given, progress=not quiet)
    answer(as_json, asdict(done), done.table())
