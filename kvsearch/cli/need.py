"""`kvsearch need`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvsearch.cli.output import answer
from kvsearch.options.other_commands import NeedConfig
from kvsearch.options.to_click import options, output_options

if TYPE_CHECKING:
    from kvsearch.commands.need import Need


@click.command("need")
@options(NeedConfig)
@output_options
def command(as_json: bool, quiet: bool, **given: Any) -> None:
    """Say what the KV cache of a model takes, and whether it has to be smaller.

    No weights are loaded. 16 bits are the full cache; the next command searches for a policy.
    """
    from kvsearch.commands.need import need

    found = need(**given, progress=not quiet)
    answer(as_json, found.document(), _text(found))


_COST = (
    "What a smaller cache costs, however good the policy is: a prompt's prefix is no longer shared "
    "between requests once tokens of it are evicted; contexts of a few hundred tokens have little "
    "to save; and on a CPU a token is decoded more slowly than from the full cache (`kvsearch "
    "bench` measures it here)."
)


def _text(found: "Need") -> str:
    """A table of caches and what fits, a verdict, what it costs, and the command to run next."""
    from kvsearch.report.screen import printed

    return "\n".join(_lines(found, printed()))


def _lines(found: "Need", width: int | None) -> Iterator[str]:
    from kvsearch.report.screen import Column, folded, table
    from kvsearch.report.tables import bytes_text

    s = found.shape
    yield (
        f"{found.model}: {s.layers} layers with {s.kv_heads} KV heads of {s.head_dim}, "
        f"{s.budget_bytes(1):,} bytes a token in 16 bits; weights {bytes_text(found.weights)}"
    )
    if found.windowed:
        own = f"{bytes_text(found.windowed)} of a request are in layers with a sliding window"
        yield from folded([f"{own}, which no policy makes smaller"], width)
    columns = [Column("cache", 18, left=True), Column("a request", 12)]
    known = found.memory is not None
    if known:
        columns += [Column("at once", 10), Column("longest context", 16)]
    cells = []
    for fit in found.fits:
        part = 1 / fit.share
        name = {1: "16 bits", 2: "8 bits"}.get(round(part), f"1/{part:.0f} of the bytes")
        more = [f"{fit.requests:,}", f"{fit.context:,}"] if known else []
        cells.append([name, bytes_text(fit.bytes), *more])
    yield ""
    yield from table(columns, cells, width)
    about = f"a request has {found.context:,} tokens"
    if known:
        about += (
            f", and the longest context is that of {found.at_once:,} at once; of the memory a "
            "tenth is left for activations"
        )
    yield from folded(
        [about, "", found.verdict, *([_COST] * (found.share is not None and found.share < 1 / 2))],
        width,
    )
    if found.command:
        yield from ("", f"next: {found.command}")
