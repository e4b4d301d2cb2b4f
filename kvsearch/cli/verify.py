"""`kvsearch verify`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import VerifyConfig
from kvsearch.options.to_click import PLACE, options, output_options

if TYPE_CHECKING:
    from kvsearch.commands.verify import Verified

NOT_ACTIVE = 3


@click.command("verify")
@click.argument("policy", type=PLACE)
@options(VerifyConfig)
@output_options
def command(policy: Path, as_json: bool, quiet: bool, **given: Any) -> None:
    """Say whether a running server really has POLICY, by its log-probabilities of a text.

    POLICY is a policy file, or a folder with one: a run folder's is its recommended policy. Exit
    code 3 if the server has the full cache, or anything else. A key that the server asks for is
    taken from OPENAI_API_KEY.
    """
    from kvsearch.commands.verify import verify

    found = verify(policy, **given, progress=not quiet)
    answer(as_json, found.document(), _text(found))
    if not found.active:
        raise SystemExit(NOT_ACTIVE)


def _text(found: "Verified") -> str:
    """A table of three losses, the slope between them, and the verdict."""
    from kvsearch.report.screen import Column, folded, printed, table

    width = printed()
    columns = [Column("", 24, left=True), Column("NLL", 8), Column("the server is off", 18)]
    rows = [
        [f"{found.model} (server)", f"{found.nll_server:.4f}", ""],
        [f"predicted: {found.policy}", f"{found.nll_policy:.4f}", f"{found.off_policy:.4f}"],
        ["predicted: full cache", f"{found.nll_full:.4f}", f"{found.off_full:.4f}"],
    ]
    about = (
        f"{found.tokens:,} tokens of {found.text}; off is a token's difference in nats, absolute. "
        f"The server follows the policy with a slope of {found.slope} (1: as predicted, 0: the "
        "full cache)"
    )
    if found.off_before is not None:
        about += f"; before the policy changes anything it is {found.off_before:.4f} off"
    lines = [*table(columns, rows, width), *folded([f"{about}.", "", found.verdict], width)]
    return "\n".join(lines)
