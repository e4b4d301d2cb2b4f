"""Which tokens of a stream are anchors: the one seam through which token ids reach the cache.

A hook on the model's body sees the ids and the cache of every call. It tells the cache's stream,
on the host, which of them are anchors; layers only read those flags. A second hook lets the model's
embedding take the id of a new token, `<AC>`, which no other policy ever meets.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsearch.errors import PolicyError
from kvsearch.models.shape import body
from kvsearch.policy import Anchors, Policy
from kvsearch.policy.anchors import NEW
from kvsearch.policy.sequences import Flags
from kvsearch.workloads.text.endings import endings, full_stop

Ids = NDArray[np.int64]


class Stream:
    """Flags of the tokens of one stream, which every sequence of a batch shares.

    Args:
        which: whether ids `[B, M]` are anchors, given the index of the first in the stream.
    """

    def __init__(self, which: Callable[[Ids, int], Flags]) -> None:
        self._which = which
        self._flags = np.empty(0, dtype=np.bool_)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # works on the host
    def update(self, ids: Tensor, seen: int) -> None:
        """Take the ids `[B, M]` of the call that follows `seen` tokens.

        Raises:
            PolicyError: sequences of the batch have anchors at different places.
        """
        rows = self._which(ids.cpu().numpy(), seen)
        if (rows != rows[:1]).any():
            raise PolicyError(
                "field anchors: sequences of this batch have anchors at different places, and so "
                "would hold different numbers of slots; give one sequence at a time"
            )
        self._flags = np.concatenate([self._flags[:seen], rows[0]])

    def flags(self, seen: int, many: int) -> Flags:
        """Flags of the `many` tokens after the first `seen` `[M]`.

        Raises:
            PolicyError: the model was called without token ids.
        """
        found = self._flags[seen : seen + many]
        if len(found) < many:
            raise PolicyError(
                "field anchors: this call brings no token ids, by which anchors are found; give "
                "input_ids instead of embeddings"
            )
        return found


def stream(policy: Policy, model: PreTrainedModel, tokenizer: Any) -> Stream | None:
    """Where the layers of a cache for `model` learn of anchors; None if the policy has none.

    Raises:
        PolicyError: the policy needs a tokenizer and none is given, or that has no such tokens.
    """
    if policy.anchors is None:
        return None
    watch(model)
    return Stream(finder(policy.anchors, model, tokenizer))


def finder(anchors: Anchors, model: PreTrainedModel, tokenizer: Any) -> Callable[[Ids, int], Flags]:
    """Whether ids `[B, M]` are anchors, given the index of the first in the stream.

    Raises:
        PolicyError: as for `stream`.
    """
    every = anchors.at
    if isinstance(every, int) and not anchors.insert:
        return partial(_at_every, every)
    if anchors.insert:
        wanted = np.array([new_token(anchors, model, tokenizer)])
    elif anchors.at == "given":
        wanted = np.array(anchors.ids)
        if (most := int(wanted.max())) >= (rows := _embedding(model).num_embeddings):
            raise PolicyError(f"field anchors.ids: {most} is no token of this model, it has {rows}")
    else:
        wanted = endings(_needed(tokenizer), anchors.marks)
    return partial(_among, wanted)


def _at_every(n: int, ids: Ids, first: int) -> Flags:
    return np.broadcast_to((np.arange(first, first + ids.shape[1]) + 1) % n == 0, ids.shape)


def _among(wanted: Ids, ids: Ids, first: int) -> Flags:
    return np.isin(ids, wanted)


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise PolicyError(
            "field anchors: which tokens are anchors depends on their text; give the tokenizer, "
            "as in PolicyCache(policy, model, tokenizer=tokenizer)"
        )
    return tokenizer


# -- hooks -------------------------------------------------------------------------------------

_watched: WeakKeyDictionary[PreTrainedModel, None] = WeakKeyDictionary()
_enlarged: WeakKeyDictionary[PreTrainedModel, "_NewTokens"] = WeakKeyDictionary()


def watch(model: PreTrainedModel) -> None:
    """Let the stream of every cache that `model` is called with see the ids of the call."""
    if model not in _watched:
        body(model).register_forward_pre_hook(_tell, with_kwargs=True)
        _watched[model] = None


def _tell(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    stream: Stream | None = getattr(cache, "stream", None)
    ids = kwargs.get("input_ids", args[0] if args else None)
    if cache is not None and stream is not None and ids is not None:
        stream.update(ids, cache.held[0].seen)


def new_token(anchors: Anchors, model: PreTrainedModel, tokenizer: Any) -> int:
    """Id of the token that `anchors` inserts: the tokenizer's, or one beyond the vocabulary.

    An id beyond the vocabulary has an embedding, but no logit: it is never predicted.
    """
    known = _needed(tokenizer).get_vocab().get(NEW)
    if known is not None:
        return int(known)
    if model not in _enlarged:
        _enlarged[model] = _NewTokens(_embedding(model), full_stop(tokenizer))
    return _enlarged[model].first + (anchors.embedding == "mean")


def _embedding(model: PreTrainedModel) -> nn.Embedding:
    found: nn.Embedding = model.get_input_embeddings()
    return found


class _NewTokens:
    """Embeddings of two ids beyond the vocabulary: a copy of one row, and the mean of all.

    Attributes:
        first: the id of the copy; the mean follows.
    """

    def __init__(self, module: nn.Embedding, copied: int) -> None:
        self.first, self._copied = module.num_embeddings, copied
        with torch.no_grad():
            # as the module returns them: some models scale what they look up
            every = torch.arange(self.first, device=module.weight.device).split(4096)
            total = sum(module(x).double().sum(0) for x in every)
        self._mean = total / self.first
        self._asked: Tensor | None = None
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Embedding, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0]
        # a vocabulary that has grown since (`kvsearch adapt`) has rows of its own for such ids
        self._asked = ids if module.num_embeddings == self.first else None
        if self._asked is None:
            return args
        return (torch.where(ids < self.first, ids, self._copied), *args[1:])

    def _after(self, _: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        if self._asked is None:
            return out
        mean = (self._asked > self.first).unsqueeze(-1)
        self._asked = None
        return torch.where(mean, self._mean.to(out), out)
