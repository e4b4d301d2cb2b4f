"""A policy's pass over windows of text, which can stop on the way and continue from there.

The cache of an unfinished window stays in memory, so that every token is evaluated once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.by_age import plans
from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import OutOfMemory, lacks_memory
from kvsearch.evaluation.batches import Batches
from kvsearch.evaluation.fed import Fed, feed, flags
from kvsearch.models.head import Head
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, check, layout
from kvsearch.policy.closings import TextBytes, text_bytes


class Replay:
    """One policy on windows `[W, T]`; made by `Evaluator.replay`.

    Attributes:
        spent: tokens that went through the model, summed over windows; counts repeated ones.

    Raises:
        PolicyError: the model cannot run the policy, or it waits for a prompt and none is given.
        TextError: with inserted anchors a window is longer than the model's positions.
    """

    def __init__(
        self,
        head: Head,
        loaded: LoadedModel,
        policy: Policy,
        windows: NDArray[np.int64],
        *,
        batches: Batches | None = None,
        prompt: int = 0,
        **options: Any,
    ) -> None:
        check(policy, loaded.shape, prompt=prompt)
        self._head, self._loaded, self.policy = head, loaded, policy
        self._prompt, self._options = prompt, options
        self._windows, self._batches = windows, batches or Batches(loaded)
        if policy.budgets.kind == "adakv" or policy.anchors is not None:
            self._batches = Batches(loaded, 1)  # heads of two texts would hold different numbers
        self._groups: list[_Group] = []  # of the first windows
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
            windows: how many windows, from the first; all if None. If a number of windows a
                forward pass was asked for, those of a pass are done together, wanted or not.
            progress: called with the number of tokens done.

        Raises:
            OutOfMemory: the device has no room for the cache and activations.
        """
        parts, done, wanted = list[Tensor](), 0, len(self._windows)  # windows
        wanted = wanted if windows is None else min(windows, wanted)
        while done < wanted:
            group = self._group(len(parts), done, wanted)
            before = self.spent
            with torch.inference_mode():
                if stop > group.done and not self._advanced(group, stop):
                    self._groups = self._groups[: len(parts)]
                    continue  # with fewer windows, or none
            if progress is not None:
                progress(self.spent - before)
            parts.append(torch.cat(group.nll, 1)[: wanted - done, : stop - 1])
            done += len(group.ids)
        return torch.cat(parts).cpu().numpy()

    def _group(self, i: int, first: int, wanted: int) -> "_Group":
        """The windows of pass `i`, which begin at `first`."""
        if i == len(self._groups):
            left = (wanted if self._batches.asked is None else len(self._windows)) - first
            mine = self._windows[first : first + self._batches.size(left, self._windows.shape[1])]
            fed = feed(self._loaded, self.policy, mine[0])
            self._groups.append(_Group(mine, fed, self._loaded.device))
        return self._groups[i]

    def _advanced(self, group: "_Group", stop: int) -> bool:
        """Take in tokens of a group up to `stop`; False if it has too many windows for that."""
        try:
            self._advance(group, stop)
        except (RuntimeError, MemoryError) as e:
            if not lacks_memory(e):
                raise
            last = group is self._groups[-1]  # what comes after it is not lost
            if not (last and self._batches.fewer(len(group.ids))):
                raise OutOfMemory(
                    f"out of memory with windows of {stop} tokens; lower --context or --batch"
                ) from e
        else:
            return True
        # only now: until an `except` ends, the traceback holds the frames and with them the caches
        self._cache = group.cache = None
        if "cuda" in self._loaded.devices:
            torch.cuda.empty_cache()  # blocks of the larger pass are not what cuBLAS can have
        return False

    def _advance(self, group: "_Group", stop: int) -> None:
        if group.cache is None or not continues(self.policy):
            self._cache = None  # frees the one before
            group.begin(deployed(self._loaded, self.policy, packed=False, **self._options))
        assert group.cache is not None
        start = group.done
        ends = [start, stop]
        if start == 0 and self.policy.prompted and 0 < self._prompt < stop:
            ends = [start, self._prompt, stop]
        edges = [group.fed.until(end) for end in ends]
        hidden = [] if group.last is None else [group.last]
        for a, b in pairwise(edges):
            hidden.append(self._head.hidden(group.ids[:, a:b], group.cache))
        held = torch.cat(hidden, 1)
        group.nll.append(self._head.nll(*group.asked(held, edges[-1], stop)))
        again = edges[1] if start == 0 and self.policy.rereads else 0
        self.spent += len(group.ids) * (edges[-1] - edges[0] + again)
        self._cache = group.cache
        group.last, group.done = held[:, -1:], stop
        if stop == len(group.fed.places):
            group.cache = None  # windows further on need the memory

    def bytes_resident(self) -> int:
        """Bytes per sequence of the packed cache of the last windows, over the real tensors."""
        assert self._cache is not None
        return sum(state.pack().nbytes for state in self._cache.states)

    def anchored(self) -> "Anchored | None":
        """What anchors make of the whole windows; None if the policy has none."""
        if self.policy.anchors is None:
            return None
        sizes = layout(self.policy, self._loaded.shape)
        which = [flags(self._loaded, self.policy, group.fed.ids) for group in self._groups]
        found = [
            text_bytes(sizes, x, group.fed.until(self._prompt))
            for x, group in zip(which, self._groups, strict=True)
        ]
        peak, mean = max(x.peak for x in found), sum(x.mean for x in found) / len(found)
        return Anchored(
            sum(int(x.sum()) for x in which),
            max(len(x) for x in which),
            TextBytes(peak, mean, found[-1].end),
        )

    @property
    def impls(self) -> dict[str, str]:
        """Which implementation of each op ran."""
        states = [] if self._cache is None else self._cache.states
        return {k: v for s in states for k, v in s.impls.items()}


@dataclass(frozen=True)
class Anchored:
    """What anchors make of windows of text.

    Attributes:
        count: anchors in all of them.
        tokens: most tokens that the model is fed in one of them, inserted ones included.
        bytes: exact bytes per sequence: the most of any window, the mean over windows, and at the
            end of the last one.
    """

    count: int
    tokens: int
    bytes: TextBytes


def deployed(loaded: LoadedModel, policy: Policy, **options: Any) -> PolicyCache:
    """The cache of a loaded model, whose tokenizer says which tokens are anchors."""
    return PolicyCache(policy, loaded.model, tokenizer=loaded.tokenizer, **options)


class _Group:
    """Windows `[B, T]` that share a forward pass, and how far they are.

    Windows into which tokens are put are alone in their group.
    """

    def __init__(self, windows: NDArray[np.int64], fed: Fed, device: str) -> None:
        self.fed, own = fed, torch.from_numpy(windows).to(device)
        self.inserted = len(fed.ids) > windows.shape[1]
        self.targets = own
        self.ids = torch.from_numpy(fed.ids[None]).to(device) if self.inserted else own
        self.cache: PolicyCache | None = None
        self.done = 0
        self.last: Tensor | None = None  # hidden state of the newest token
        self.nll: list[Tensor] = []

    def begin(self, cache: PolicyCache) -> None:
        """Start at the first token."""
        self.cache, self.done, self.last, self.nll = cache, 0, None, []

    def asked(self, held: Tensor, end: int, stop: int) -> tuple[Tensor, Tensor]:
        """What precedes each new token of the windows: hidden states, and tokens to predict.

        Args:
            held: hidden states of the tokens fed up to `end` `[B, N, hidden]`.
            end: tokens fed.
            stop: tokens of the windows up to which the model has been fed.
        """
        first = max(self.done, 1)
        if self.inserted:
            before = torch.from_numpy(self.fed.places[first:stop] - 1 - (end - held.shape[1]))
            held = held.index_select(1, before.to(held.device))
        return held, self.targets[:, first - 1 : stop]


def continues(policy: Policy) -> bool:
    """Whether continuing is exact and cheap; other policies start over.

    A prompt ends where a call ends, so a policy with that trigger needs the prompt in one call.
    """
    return not policy.prompted and not plans.applies(policy)
