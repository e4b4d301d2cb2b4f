"""A policy's pass over windows of text that can stop at a rung and go on from there.

A race looks at a prefix before it pays for the rest. The cache stays in memory in between, so a
policy that goes on pays for every token once.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache import lifetimes
from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import OutOfMemory
from kvsearch.evaluate.head import Head
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy


class Replay:
    """One policy on windows `[W, T]`; made by `Evaluator.replay`.

    Attributes:
        stop: tokens of every window done so far.
        spent: tokens that went through the model, summed over windows; counts repeated ones.
    """

    def __init__(
        self,
        head: Head,
        loaded: LoadedModel,
        policy: Policy,
        windows: NDArray[np.int64],
        *,
        batch: int = 1,
        prompt: int = 0,
        **options: Any,
    ) -> None:
        self._head, self._loaded, self.policy = head, loaded, policy
        self._prompt, self._options = prompt, options
        self._ids = [
            torch.from_numpy(windows[i : i + batch]).to(loaded.device)
            for i in range(0, len(windows), batch)
        ]
        self.spent = 0
        self._restart()

    def _restart(self) -> None:
        self.stop = 0
        self._caches = [
            PolicyCache(self.policy, self._loaded.model, packed=False, **self._options)
            for _ in self._ids
        ]
        self._last: list[Tensor | None] = [None] * len(self._ids)
        self._nll: list[list[Tensor]] = [[] for _ in self._ids]

    def to(self, stop: int, progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """NLL `[W, stop - 1]` of every window's first `stop` tokens, in nats; entry t is token t+1.

        Args:
            stop: tokens; at least those of the call before.
            progress: called with the number of tokens done.

        Raises:
            OutOfMemory: the device has no room for the cache and activations.
        """
        if self.stop and stop > self.stop and not continues(self.policy):
            self._restart()
        with torch.inference_mode():
            for i, ids in enumerate(self._ids):
                if stop > self.stop:
                    self._forward(i, ids, stop)
                    self.spent += len(ids) * (stop - self.stop)
                if progress is not None:
                    progress(len(ids) * (stop - self.stop))
        self.stop = max(stop, self.stop)
        parts = [torch.cat(nll, 1)[:, : stop - 1] for nll in self._nll]
        return torch.cat(parts).cpu().numpy()

    def _forward(self, i: int, ids: Tensor, stop: int) -> None:
        cache, start = self._caches[i], self.stop
        edges = [start, stop]
        if start == 0 and cache.policy.trigger != "stream" and 0 < self._prompt < stop:
            edges = [start, self._prompt, stop]
        before = self._last[i]
        hidden = [] if before is None else [before]
        try:
            for a, b in pairwise(edges):
                hidden.append(self._head.hidden(ids[:, a:b], cache))
            held = torch.cat(hidden, 1)
            first = start if before is None else start - 1
            self._nll[i].append(self._head.nll(held, ids[:, first:stop]))
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(
                f"out of memory with windows of {stop} tokens; lower --context or --batch"
            ) from e
        self._last[i] = held[:, -1:]

    def bytes_resident(self) -> int:
        """Bytes per sequence of the packed cache of the last windows, over the real tensors."""
        return sum(state.pack().nbytes for state in self._caches[-1].states)

    @property
    def impls(self) -> dict[str, str]:
        """Which implementation of each op ran."""
        return {k: v for s in self._caches[-1].states for k, v in s.impls.items()}


def continues(policy: Policy) -> bool:
    """Whether going on is exact and cheap; other policies start over, which costs them little.

    A prompt ends where a call ends, so a policy that waits for it must see all of it at once.
    """
    return policy.trigger == "stream" and not lifetimes.applies(policy)
