"""What tokens look like: which of them end in a mark, and where sentences end among them."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import PolicyError, quoted
from kvsearch.workloads.text.borders import encoder, inside

Ids = NDArray[np.int64]

_texts: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def endings(tokenizer: Any, marks: Sequence[str]) -> Ids:
    """Ids of all tokens whose text, without blanks around it, ends in one of `marks`, rising.

    A mark has many tokens: in SmolLM2's vocabulary a bare full stop is another one than a full stop
    after a blank, and than one before a quotation mark.

    Raises:
        PolicyError: no token ends in one of the marks.
    """
    texts = [text.strip() for text in vocabulary(tokenizer)]
    for mark in marks:
        if not any(text.endswith(mark) for text in texts):
            raise PolicyError(
                f"field anchors.marks: no token of this tokenizer ends in {quoted(mark)}"
            )
    found = [i for i, text in enumerate(texts) if text.endswith(tuple(marks))]
    return np.array(found, dtype=np.int64)


def vocabulary(tokenizer: Any) -> list[str]:
    """Text of every token by id, decoded once a tokenizer; special tokens have none."""
    if tokenizer not in _texts:
        special = {*tokenizer.all_special_ids}
        _texts[tokenizer] = [
            "" if i in special else tokenizer.decode([i]) for i in range(len(tokenizer))
        ]
    return _texts[tokenizer]


def full_stop(tokenizer: Any) -> int:
    """Id of the bare full stop."""
    return inside(encoder(tokenizer), ".")[-1]


def sentence_ends(tokenizer: Any, ids: Ids) -> Ids:
    """Tokens after which a sentence ends and another one follows, rising.

    Sentences are those of `sentencex`, whose rules come with it.

    Args:
        tokenizer: of the text.
        ids: of a text `[T]`.
    """
    from sentencex import segment

    pieces = _pieces(tokenizer, ids)
    text, at, ends = "".join(pieces), 0, []
    for sentence in segment("en", text):
        at += len(sentence)
        if sentence.strip():
            ends.append(at - len(sentence) + len(sentence.rstrip()))
    starts = np.cumsum([0, *map(len, pieces)])
    # the token that holds the last sign of each sentence, the last sentence apart
    return np.unique(np.searchsorted(starts, ends[:-1], side="left") - 1)


def _pieces(tokenizer: Any, ids: Ids) -> list[str]:
    """What each token adds to the text; blanks before a word are the word's."""
    lead = full_stop(tokenizer)
    before = len(tokenizer.decode([lead]))
    texts = {int(i): tokenizer.decode([lead, int(i)])[before:] for i in np.unique(ids)}
    return [texts[int(i)] for i in ids]
