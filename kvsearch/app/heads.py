"""What a model's KV heads lose, where policies follow it; and `kvsearch heads`, which shares it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from kvsearch.app import inputs
from kvsearch.app.learn import learns, with_learned
from kvsearch.app.policies import PolicyLike, values_of
from kvsearch.app.progress import Shown
from kvsearch.evaluation import head_losses
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import require_writable, write_atomic
from kvsearch.knobs import Setting, needs_heads
from kvsearch.models.aliases import DEFAULT
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


def heads(
    model: str | PathLike[str] | LoadedModel = DEFAULT,
    *,
    out: str | PathLike[str] | None = None,
    measure_heads: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = False,
) -> Heads:
    """Measure what every KV head of a model loses, once; budgets per head follow it.

    Args:
        model: as for `kvsearch.search`.
        out: write the losses to this file, for `--heads` and for others.
        measure_heads: measure, even where they are shipped or kept on disk.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        progress: print progress to stderr.

    Returns:
        The losses, where they are from, and the text of the file.

    Raises:
        KvsearchError: the model cannot be loaded, or the file cannot be written.
    """
    shown = Shown(quiet=not progress)
    if out is not None:
        require_writable(Path(out))
    loaded = inputs.model(
        model,
        dtype=dtype, device=device, context=head_losses.FEWEST, say=shown.say,
    )  # fmt: skip
    found, where = head_losses.of_model(Evaluator(loaded), shown.step, anew=measure_heads)
    text = head_losses.document(loaded, found)
    if out is not None:
        write_atomic(Path(out), text)
    return Heads(found, where, text)


def for_policies(
    setting: Setting,
    policies: Sequence[PolicyLike],
    loaded: LoadedModel,
    shown: Shown,
    *,
    file: str | PathLike[str] | None = None,
    anew: bool = False,
) -> Setting:
    """The setting with what policies follow: what heads lose, and weights that rules learned.

    Args:
        setting: of the evaluation.
        policies: that are evaluated.
        loaded: the model.
        shown: for progress, and a sentence that says where the losses are from.
        file: a `heads.json` to read instead.
        anew: measure, whatever is kept.

    Raises:
        KvsearchError: the file is wrong.
    """
    if any(map(learns, policies)):
        setting = with_learned(setting, loaded)
    names = [str(p) for p in policies if needs_heads(values_of(p))]
    if not names and file is None:
        return setting
    return replace(setting, heads=found(loaded, shown, file=file, anew=anew, of=", ".join(names)))


def found(
    loaded: LoadedModel,
    shown: Shown,
    *,
    file: str | PathLike[str] | None = None,
    anew: bool = False,
    of: str = "",
) -> HeadLosses:
    """Losses of the heads, from a file, shipped, kept or measured; says which.

    Args:
        loaded: the model.
        shown: for progress and the sentence.
        file: a `heads.json` to read.
        anew: measure, whatever is kept.
        of: names of the policies that follow them.

    Raises:
        KvsearchError: the file is wrong.
    """
    if file is not None:
        losses, said = head_losses.read(Path(file), loaded)
        if said is not None:
            shown.say(said)
        return losses
    losses, where = head_losses.of_model(Evaluator(loaded), shown.step, anew=anew)
    shown.say(f"{of + ': ' if of else ''}losses of the {len(losses.slots)} KV heads: {where}")
    return losses
