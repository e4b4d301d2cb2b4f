"""Whether a model and a tokenizer fit: token ids that the one gives and the other has."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.errors import ModelError, quoted
from kvsearch.models.shape import text_config

FAR = 1.25  # times as many tokens in a model as in its tokenizer; padding adds 2 % at most


def rows(model: Any) -> int:
    """Token ids that a model of transformers has, from 0 on: embeddings, and logits if fewer."""
    counts = []
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = getattr(layer, "weight", None)  # a method of a quantised layer
        if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.is_floating_point():
            counts.append(weight.shape[0])  # of 4 bits a tensor has another shape
        else:
            count = getattr(layer, "num_embeddings", None) or getattr(layer, "out_features", None)
            counts += [int(count)] if count else []
    return min(counts) if counts else int(text_config(model.config).vocab_size)


def require_ids(
    model: Any, tokenizer: Any, ids: NDArray[np.integer[Any]], what: str, start: Sequence[int] = ()
) -> None:
    """Raise a `ModelError` where the model lacks one of the ids of a text.

    A model may have more tokens than its tokenizer: many are padded to a round number. A tokenizer
    may have further ones too, as long as no text has them.

    Args:
        model: of transformers.
        tokenizer: that gave the ids, or None.
        ids: of any shape, not empty.
        what: has the ids, for the message.
        start: tokens before every text.
    """
    count, least, last = rows(model), int(ids.min()), max((int(ids.max()), *start))
    if least < 0:
        raise ModelError(f"{what} has token {least}; token ids are whole numbers from 0 on")
    if last < count:
        return
    word, size, wanted = "", "", last + 1
    if tokenizer is not None:
        word = f" ({quoted(tokenizer.convert_ids_to_tokens(last))})"
        size = f" of a tokenizer with {len(tokenizer)}"
        wanted = max(wanted, len(tokenizer))
    raise ModelError(
        f"{what} has token {last}{word}{size}, and the model has {count} tokens; give the "
        "tokenizer of this model, or, where tokens were added to it, call "
        f"model.resize_token_embeddings({wanted}) and train them"
    )


def misfit(model: Any, tokenizer: Any) -> str:
    """A sentence where the tokenizer is much smaller than the model's vocabulary; else empty."""
    if tokenizer is None or rows(model) < FAR * (size := len(tokenizer)):
        return ""
    return (
        f"the tokenizer has {size} tokens and the model {rows(model)}, so the tokenizer "
        "may be another model's; losses of such a pair mean nothing"
    )
