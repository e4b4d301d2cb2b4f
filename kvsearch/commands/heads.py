"""What every KV head of a model loses, as a file: `kvsearch heads`."""

from dataclasses import dataclass

from kvsearch.files import require_writable, write_atomic
from kvsearch.model_analysis import head_losses
from kvsearch.model_analysis.key_offsets import KeyMeans
from kvsearch.options.function import takes
from kvsearch.options.other_commands import HeadsConfig
from kvsearch.policy import HeadLosses
from kvsearch.session import key_offsets
from kvsearch.session.head_losses import known
from kvsearch.session.session import Session


@dataclass(frozen=True)
class Heads:
    """What `heads` found.

    Attributes:
        losses: of every KV head.
        where: where they are from.
        text: of the file that shares them.
        keys: what the keys of every layer have in common.
    """

    losses: HeadLosses
    where: str
    text: str
    keys: KeyMeans


@takes(HeadsConfig)
def heads(config: HeadsConfig) -> Heads:
    """Measure what every KV head of a model loses, once; budgets per head follow it.

    Returns:
        The losses, where they are from, and the text of the file.

    Raises:
        KvsearchError: the model cannot be loaded, or the file cannot be written.
    """
    session = Session(config)
    if config.out is not None:
        require_writable(config.out)
    loaded = session.load(context=head_losses.FEWEST)
    losses, where = known(loaded, session.shown, config)
    text = head_losses.document(loaded, losses)
    if config.out is not None:
        write_atomic(config.out, text)
    keys, _ = key_offsets.known(loaded, session.shown, anew=config.measure_heads)
    return Heads(losses, where, text, keys)
