"""What commands load: the model with its kernels, and texts."""

from collections.abc import Callable, Sequence

import torch

from kvsearch.errors import ModelError
from kvsearch.models.load import LoadedModel, load_model, require_context
from kvsearch.models.vocabulary import require_ids
from kvsearch.options.checks import texts
from kvsearch.options.model import ModelConfig
from kvsearch.workloads.text import (
    Source,
    TextLike,
    builtin,
    read_dataset,
    read_files,
    read_text,
    tokenize,
)
from kvsearch.workloads.text.windows import Tokens

Say = Callable[[str], None]


def require_files(*given: TextLike | Sequence[TextLike] | None) -> None:
    """Texts that are named can be read; seen before the model is loaded, which may take minutes.

    Raises:
        TextError: one of them is missing, is a folder, or is no text.
    """
    for spec in (spec for some in given for spec in texts(some)):
        read_text(spec)


def source(
    given: TextLike | Sequence[TextLike] | None,
    dataset: str | None,
    say: Say,
    *,
    tasks: bool = False,
) -> Source:
    """The text asked for; without any, the built-in one, said as what `tasks` take or as a text."""
    files = texts(given)
    if dataset is not None:
        found = read_dataset(dataset, announce=say)
    else:
        found = read_files(files) if files else builtin()
    if tasks and not files and dataset is None:
        say(
            "no text given: tasks that hide facts in prose take the language reference inside "
            "Python; --text FILE takes another"
        )
    else:
        say(found.announcement)
    return found


def model(config: ModelConfig, *, context: int, say: Say) -> LoadedModel:
    """A model that can be run over `context` tokens, loaded where it is not yet.

    Raises:
        TextError: its positions end before that.
        ModelError: it is none, or cannot be loaded, or has another `dtype` or `device` already.
    """
    name, dtype, device = config.model, config.dtype, config.device
    if isinstance(name, LoadedModel):
        loaded = name
        if dtype != "auto" or device != "auto":
            raise ModelError(
                "a model that is loaded already keeps its dtype and device; leave both at 'auto'"
            )
        require_context(loaded.model.config, context)
    else:
        loaded = load_model(name, dtype=dtype, device=device, context=context, announce=say)
    shape = loaded.shape
    say(
        f"model {loaded.name}: {loaded.origin}; {shape.layers} cached layers, {shape.kv_heads} KV "
        f"heads of {shape.head_dim}, {loaded.dtype} on {loaded.device}"
    )
    return loaded


def about(loaded: LoadedModel) -> dict[str, str]:
    """A model in records of an evaluation."""
    return {name: getattr(loaded, name) for name in ("name", "digest", "dtype", "device")}


def kernels(loaded: LoadedModel, say: Say) -> None:
    """Have the kernels that many policies need compiled side by side; on a CPU there are none."""
    if loaded.device.startswith("cuda"):
        from kvsearch_kernels.ahead import compile_ahead

        compile_ahead(torch.device(loaded.device), getattr(torch, loaded.dtype), say)


def tokenized(loaded: LoadedModel, found: Source) -> Tokens:
    """Tokens of a text, all of which the model has.

    Raises:
        TextError: there are none.
        ModelError: the model and its tokenizer do not fit.
    """
    tokens = tokenize(loaded.tokenizer, found)
    require_ids(loaded.model, loaded.tokenizer, tokens.ids, tokens.name, tokens.start)
    return tokens
