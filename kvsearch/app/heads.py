"""What a model's KV heads lose, where policies follow it; and `kvsearch heads`, which shares it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvsearch.app import inputs
from kvsearch.app.learn import learns, with_learned
from kvsearch.app.policies import values_of
from kvsearch.app.progress import Shown
from kvsearch.config.commands import HeadsConfig, PolicyLike
from kvsearch.config.function import takes
from kvsearch.config.model import HeadLossConfig, MeasureHeadsConfig
from kvsearch.evaluation import head_losses
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import require_writable, write_atomic
from kvsearch.knobs import Setting, needs_heads
from kvsearch.models.load import LoadedModel
from kvsearch.policy import HeadLosses


@dataclass(frozen=True)
class Heads:
    """What `heads` found.

    Attributes:
        losses: of every KV head.
        where: where they are from.
        text: of the file that shares them.
    """

    losses: HeadLosses
    where: str
    text: str


@takes(HeadsConfig)
def heads(config: HeadsConfig) -> Heads:
    """Measure what every KV head of a model loses, once; budgets per head follow it.

    Returns:
        The losses, where they are from, and the text of the file.

    Raises:
        KvsearchError: the model cannot be loaded, or the file cannot be written.
    """
    shown = Shown(quiet=not config.progress)
    if config.out is not None:
        require_writable(config.out)
    loaded = inputs.model(config, context=head_losses.FEWEST, say=shown.say)
    losses, where = _known(loaded, shown, config)
    text = head_losses.document(loaded, losses)
    if config.out is not None:
        write_atomic(config.out, text)
    return Heads(losses, where, text)


def for_policies(
    setting: Setting,
    policies: Sequence[PolicyLike],
    loaded: LoadedModel,
    shown: Shown,
    config: HeadLossConfig | None = None,
) -> Setting:
    """The setting with what policies follow: what heads lose, and weights that rules learned.

    Args:
        setting: of the evaluation.
        policies: that are evaluated.
        loaded: the model.
        shown: for progress, and a sentence that says where the losses are from.
        config: whether they are read from a file or measured anew.

    Raises:
        KvsearchError: the file is wrong.
    """
    config = config or HeadLossConfig()
    if any(map(learns, policies)):
        setting = with_learned(setting, loaded)
    names = [str(p) for p in policies if needs_heads(values_of(p))]
    if not names and config.heads is None:
        return setting
    return replace(setting, heads=found(loaded, shown, config, of=", ".join(names)))


def found(loaded: LoadedModel, shown: Shown, config: HeadLossConfig, *, of: str = "") -> HeadLosses:
    """Losses of the heads, from a file, shipped, kept or measured; says which.

    Args:
        loaded: the model.
        shown: for progress and the sentence.
        config: whether they are read from a file or measured anew.
        of: names of the policies that follow them.

    Raises:
        KvsearchError: the file is wrong.
    """
    if config.heads is not None:
        losses, said = head_losses.read(config.heads, loaded)
        if said is not None:
            shown.say(said)
        return losses
    losses, where = _known(loaded, shown, config)
    shown.say(f"{of + ': ' if of else ''}losses of the {len(losses.slots)} KV heads: {where}")
    return losses


def _known(loaded: LoadedModel, shown: Shown, config: MeasureHeadsConfig) -> tuple[HeadLosses, str]:
    """Losses of the heads, shipped, kept or measured, and where they are from."""
    return head_losses.of_model(Evaluator(loaded), shown.step, anew=config.measure_heads)
