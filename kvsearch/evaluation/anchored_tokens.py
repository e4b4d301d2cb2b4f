"""What a model is fed under a policy: a window of text, with the new tokens that its anchors are.

The insertion is a change of the text, made before the model sees it. Losses stay those of the
original tokens: an inserted anchor predicts the token after it, and nothing is asked to predict an
anchor.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsearch.cache.model.anchors import finder, new_token
from kvsearch.models.load import LoadedModel, require_context
from kvsearch.models.vocabulary import require_ids
from kvsearch.policy import Policy
from kvsearch.policy.sequences import Flags
from kvsearch.workloads.text.endings import endings, sentence_ends

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Fed:
    """One window as the model is fed it.

    Attributes:
        ids: tokens `[N]`, inserted ones included.
        places: where the window's own tokens are among them, rising `[T]`.
    """

    ids: Ids
    places: Ids

    def until(self, tokens: int) -> int:
        """How many tokens the model is fed up to the window's first `tokens`."""
        return int(self.places[tokens - 1]) + 1 if tokens else 0


def feed(loaded: LoadedModel, policy: Policy, window: Ids) -> Fed:
    """Put the new tokens of `policy`, if it has such, into a window `[T]`.

    Raises:
        PolicyError: the tokenizer has no such tokens.
        TextError: with them the window is longer than the model's positions.
    """
    anchors, T = policy.anchors, len(window)
    if anchors is None or not anchors.insert or anchors.at == "given":
        return Fed(window, np.arange(T))
    if anchors.at == "marks":
        found = np.flatnonzero(np.isin(window, endings(loaded.tokenizer, anchors.marks)))
    elif anchors.at == "sentences":
        found = sentence_ends(loaded.tokenizer, window)
    else:
        found = np.arange(anchors.at - 1, T, anchors.at)
    after = found[found < T - 1] + 1  # nothing follows the last token
    token = new_token(anchors, loaded.model, loaded.tokenizer)
    places = np.arange(T) + np.searchsorted(after, np.arange(T), side="right")
    ids = np.full(T + len(after), token, dtype=np.int64)
    ids[places] = window
    if policy.positions == "original":
        require_context(loaded.model.config, len(ids))
    return Fed(ids, places)


def require_anchors(loaded: LoadedModel, policy: Policy) -> None:
    """Raise a `KvsearchError` if tokenizer or model has no tokens such as the policy's anchors."""
    if policy.anchors is not None:
        finder(policy.anchors, loaded.model, loaded.tokenizer)
        if policy.anchors.insert and loaded.silent is not None:
            new = np.array([loaded.silent])
            require_ids(loaded.model, loaded.tokenizer, new, "a text with inserted anchors")


def flags(loaded: LoadedModel, policy: Policy, ids: Ids) -> Flags:
    """Which of the tokens `[N]` that a model is fed are anchors."""
    assert policy.anchors is not None
    return finder(policy.anchors, loaded.model, loaded.tokenizer)(ids[None], 0)[0]
