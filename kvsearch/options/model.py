"""Which model, where it runs, and what is known of its KV heads."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.models.aliases import DEFAULT
from kvsearch.options.checks import path, which
from kvsearch.options.declare import Config, Given, option, ordered, part

if TYPE_CHECKING:
    from kvsearch.models.load import LoadedModel

    ModelLike = str | PathLike[str] | LoadedModel
    Named = str | LoadedModel

Model = Given["ModelLike", "Named"]
AnyModel = Given["ModelLike | None", "Named | None"]
File = Given[str | PathLike[str] | None, Path | None]
MODEL, HEADS = "Budget and model", "Losses of KV heads"


@part
class DeviceConfig(Config):
    """Where a model runs, and in which precision."""

    dtype: str = option("auto", "auto, float32, bfloat16, float16", group=MODEL)
    device: str = option(
        "auto",
        "auto, cpu, cuda, cuda:N, or several that share the layers: cuda:0,cuda:1",
        group=MODEL,
    )


@ordered
class NameConfig(Config):
    """Which model."""

    model: Model = option(
        DEFAULT,
        "alias, hub id, folder or .gguf file",
        which,
        group=MODEL,
        python="; or a `LoadedModel`, see `LoadedModel.of` for a transformers model of your own",
    )


@part
class ModelConfig(DeviceConfig, NameConfig):
    """Which model, and where it runs."""


@part
class MeasureHeadsConfig(Config):
    """Whether losses of the KV heads are measured anew."""

    measure_heads: bool = option(
        False,
        "measure what the KV heads lose, even where that is shipped or kept on disk",
        group=HEADS,
    )


@part
class HeadsFileConfig(Config):
    """Losses of the KV heads that someone has measured."""

    heads: File = option(
        None,
        "losses of the KV heads, written by `kvsearch heads` or a run [default: shipped, kept on "
        "disk, or measured once]",
        path,
        metavar="FILE",
        group=HEADS,
    )


@part
class HeadLossConfig(MeasureHeadsConfig, HeadsFileConfig):
    """Where losses of the KV heads are from."""
