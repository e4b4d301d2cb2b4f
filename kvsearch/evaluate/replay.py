"""A policy's pass over windows of text, which can stop at a rung and continue from there.

A race compares policies on a part of the text before the rest is evaluated. The cache of an
unfinished window stays in memory, so that every token is evaluated once.
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
from kvsearch.policy import Policy, check


class Replay:
    """One policy on windows `[W, T]`; made by `Evaluator.replay`.

    Attributes:
        spent: tokens that went through the model, summed over windows; counts repeated ones.

    Raises:
        PolicyError: the model cannot run the policy, or it waits for a prompt and none is given.
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
        check(policy, loaded.shape, prompt=prompt)
        self._head, self._loaded, self.policy = head, loaded, policy
        self._prompt, self._options = prompt, options
        if policy.budgets.kind == "adakv":
            batch = 1  # heads of two texts would hold different numbers of slots
        self._groups = [
            _Group(torch.from_numpy(windows[i : i + batch]).to(loaded.device))
            for i in range(0, len(windows), batch)
        ]
        self._cache: PolicyCache | None = None  # the one that took in the newest tokens
        self.spent = 0

    def to(
        self,
        stop: int,
        windows: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """NLL `[windows, stop - 1]` of the first tokens, in nats; entry t is that of token t + 1.

        Args:
            stop: tokens of each window.
            windows: how many windows, from the first; all if None. Windows that share a forward
                pass are done together, whether asked for or not.
            progress: called with the number of tokens done.

        Raises:
            OutOfMemory: the device has no room for the cache and activations.
        """
        parts, wanted = [], windows
        for group in self._groups:
            if wanted is not None and wanted <= 0:
                break
            before = self.spent
            with torch.inference_mode():
                if stop > group.done:
                    self._advance(group, stop)
            if progress is not None:
                progress(self.spent - before)
            parts.append(torch.cat(group.nll, 1)[:wanted, : stop - 1])
            wanted = None if wanted is None else wanted - len(group.ids)
        return torch.cat(parts).cpu().numpy()

    def _advance(self, group: "_Group", stop: int) -> None:
        if group.cache is None or not continues(self.policy):
            self._cache = None  # frees the one before
            group.begin(PolicyCache(self.policy, self._loaded.model, packed=False, **self._options))
        assert group.cache is not None
        start = group.done
        edges = [start, stop]
        if start == 0 and self.policy.trigger != "stream" and 0 < self._prompt < stop:
            edges = [start, self._prompt, stop]
        hidden = [] if group.last is None else [group.last]
        first = start - len(hidden)
        try:
            for a, b in pairwise(edges):
                hidden.append(self._head.hidden(group.ids[:, a:b], group.cache))
            held = torch.cat(hidden, 1)
            group.nll.append(self._head.nll(held, group.ids[:, first:stop]))
        except torch.OutOfMemoryError as e:
            raise OutOfMemory(
                f"out of memory with windows of {stop} tokens; lower --context or --batch"
            ) from e
        self.spent += len(group.ids) * (stop - start)
        self._cache = group.cache
        group.last, group.done = held[:, -1:], stop
        if stop == group.ids.shape[1]:
            group.cache = None  # windows further on need the memory

    def bytes_resident(self) -> int:
        """Bytes per sequence of the packed cache of the last windows, over the real tensors."""
        assert self._cache is not None
        return sum(state.pack().nbytes for state in self._cache.states)

    @property
    def impls(self) -> dict[str, str]:
        """Which implementation of each op ran."""
        states = [] if self._cache is None else self._cache.states
        return {k: v for s in states for k, v in s.impls.items()}


class _Group:
    """Windows `[B, T]` that share a forward pass, and how far they are."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.cache: PolicyCache | None = None
        self.done = 0
        self.last: Tensor | None = None  # hidden state of the newest token
        self.nll: list[Tensor] = []

    def begin(self, cache: PolicyCache) -> None:
        """Start at the first token."""
        self.cache, self.done, self.last, self.nll = cache, 0, None, []


def continues(policy: Policy) -> bool:
    """Whether continuing is exact and cheap; other policies start over.

    A prompt ends where a call ends, so a policy with that trigger needs the prompt in one call.
    """
    return policy.trigger == "stream" and not lifetimes.applies(policy)
