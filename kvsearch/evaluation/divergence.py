"""What policies lose against the full cache, whatever token comes next.

Made for many policies that are told apart by their deeper layers: the pass under the full cache is
kept, and a policy that changes nothing below some layer starts from what that layer was given.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.evaluation.replay import finite
from kvsearch.models.head import Head
from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import decoder_layers
from kvsearch.policy import Policy

HELD = 1 << 28  # log-probabilities of the full cache, at most: 1 GiB that is not computed again


class Divergence:
    """One pass of the full cache over token windows `[W, T]`; made by `Evaluator.divergence`.

    Attributes:
        spent: tokens that went through all layers, or through as many layers as that.
    """

    def __init__(self, head: Head, loaded: LoadedModel, windows: NDArray[np.int64]) -> None:
        self._head, self._model = head, loaded.model
        self._ids = torch.from_numpy(windows).to(loaded.device)
        self._layers = decoder_layers(loaded.model)
        self._given: list[Any] = []
        self.spent = 0.0
        cache = self._cache(Policy())
        with torch.inference_mode(), _noting(self._layers, self._given):
            self._full = self._hidden(cache)
        self._held: list[torch.Tensor] = []

    def of(self, policy: Policy, same: int = 0) -> NDArray[np.float32]:
        """KL divergence in nats `[W, T]` after every token, see `Head.divergence`.

        Args:
            policy: what to compare with the full cache.
            same: how many of the model's first layers keep everything under `policy` too.
        """
        with torch.inference_mode():
            if not self._held and self._full.shape[:-1].numel() * self._head.vocabulary <= HELD:
                self._held = list(self._head.expected(self._full))
            expected = self._held or self._head.expected(self._full)
            lost = self._head.divergence(expected, self._after(policy, same))
        return lost.cpu().numpy()

    def nll(self, policy: Policy | None = None, same: int = 0) -> NDArray[np.float32]:
        """NLL in nats `[W, T - 1]` of tokens 1 .. T-1; as in `of`, or None for the full cache."""
        with torch.inference_mode():
            hidden = self._full if policy is None else self._after(policy, same)
            lost = self._head.nll(hidden, self._ids)
        return lost.cpu().numpy()

    def _after(self, policy: Policy, same: int) -> torch.Tensor:
        """Last hidden states `[W, T, hidden]` under `policy`, from its first layer that differs."""
        same = same if len(self._given) == len(self._layers) else 0
        cache = self._cache(policy)
        with _repeating(self._layers[:same], self._given), finite(policy, "the text"):
            return self._hidden(cache, same)

    def _cache(self, policy: Policy) -> PolicyCache:
        return PolicyCache(policy, self._model, packed=False)  # may run the model, once

    def _hidden(self, cache: PolicyCache, same: int = 0) -> torch.Tensor:
        self.spent += self._ids.numel() * (1 - same / max(1, len(self._layers)))
        return self._head.hidden(self._ids, cache)


@contextmanager
def _noting(layers: list[nn.Module], given: list[Any]) -> Iterator[None]:
    """Append what every layer returns, in the order in which they run."""
    hooks = [x.register_forward_hook(lambda _, __, out: given.append(out)) for x in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _repeating(layers: list[nn.Module], given: list[Any]) -> Iterator[None]:
    """Let `layers` return what they returned before, without computing it again."""
    usual = [(x, x.__dict__.get("forward")) for x in layers]
    try:
        for layer, out in zip(layers, given, strict=False):
            layer.forward = lambda *_, out=out, **__: out
        yield
    finally:
        for layer, forward in usual:
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
