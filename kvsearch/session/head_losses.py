"""What a model's KV heads lose, where policies follow it."""

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import head_losses
from kvsearch.models.load import LoadedModel
from kvsearch.options.model import HeadLossConfig, MeasureHeadsConfig
from kvsearch.policy import HeadLosses
from kvsearch.session.progress import Shown


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
    losses, where = known(loaded, shown, config)
    shown.say(f"{of + ': ' if of else ''}losses of the {len(losses.slots)} KV heads: {where}")
    return losses


def known(loaded: LoadedModel, shown: Shown, config: MeasureHeadsConfig) -> tuple[HeadLosses, str]:
    """Losses of the heads, shipped, kept or measured, and where they are from."""
    return head_losses.of_model(Evaluator(loaded), shown.step, anew=config.measure_heads)
