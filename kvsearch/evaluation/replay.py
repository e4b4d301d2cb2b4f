"""A policy's forward passes over windows of text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import KvsearchError, OutOfMemory, lacks_memory
from kvsearch.evaluation.anchored_tokens import Fed, feed, flags
from kvsearch.evaluation.batches import Batches
from kvsearch.models.head import NOT_FINITE, Head
from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import angle_switch, require_angles
from kvsearch.policy import Policy, check, layout
from kvsearch.policy.sequences import TextBytes, text_bytes
from kvsearch.results.measurement import Anchored


class Replay:
    """One policy on windows `[W, T]`; made by `Evaluator.replay`.

    Attributes:
        spent: tokens that went through the model, summed over windows.

    Raises:
        PolicyError: the model cannot run the policy, or it waits for a prompt and none is given.
        ModelError: within a window the model begins to turn its keys by other angles.
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
        require_angles(angle_switch(loaded.model.config), prompt, windows.shape[1])
        self._head, self._loaded, self.policy = head, loaded, policy
        self._prompt, self._options = prompt, options
        self._windows, self._batches = windows, batches or Batches(loaded)
        if policy.budgets.kind == "adakv" or policy.anchors is not None:
            self._batches = Batches(loaded, 1)  # heads of two texts would hold different numbers
        self._fed: list[Fed] = []  # of each pass
        self._cache: PolicyCache | None = None  # of the newest pass
        self.spent = 0

    def nll(self, progress: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        """NLL `[W, T - 1]` in nats; entry t is that of token t + 1.

        Args:
            progress: called with the number of tokens done.

        Raises:
            OutOfMemory: the device has no room for the cache and activations.
            KvsearchError: attention is not finite.
        """
        parts, done, (count, tokens) = list[Tensor](), 0, self._windows.shape
        while done < count:
            mine = self._windows[done : done + self._batches.size(count - done, tokens)]
            before = self.spent
            with torch.inference_mode(), finite(self.policy, "the text"):
                part = self._try_pass(mine)
            if part is None:
                continue  # with fewer windows
            if progress is not None:
                progress(self.spent - before)
            parts.append(part)
            done += len(mine)
        return torch.cat(parts).cpu().numpy()

    def _try_pass(self, windows: NDArray[np.int64]) -> Tensor | None:
        """NLL of windows `[B, T]` that share a forward pass; None if they are too many for that."""
        try:
            return self._pass(windows)
        except (RuntimeError, MemoryError) as e:
            if not lacks_memory(e):
                raise
            if not self._batches.fewer(len(windows)):
                raise OutOfMemory(
                    f"out of memory with windows of {windows.shape[1]} tokens; lower --context or "
                    "--batch"
                ) from e
        # only now: until an `except` ends, the traceback holds the frames and with them the cache
        self._cache = None
        if "cuda" in self._loaded.devices:
            torch.cuda.empty_cache()  # blocks of the larger pass are not what cuBLAS can have
        return None

    def _pass(self, windows: NDArray[np.int64]) -> Tensor:
        self._cache = None  # frees the one before
        fed, device = feed(self._loaded, self.policy, windows[0]), self._loaded.device
        inserted = len(fed.ids) > windows.shape[1]  # such windows are alone in their pass
        own = torch.from_numpy(windows).to(device)
        ids = torch.from_numpy(fed.ids[None]).to(device) if inserted else own
        cache = deployed(self._loaded, self.policy, packed=False, **self._options)
        edges = [0, ids.shape[1]]
        if self.policy.after_prompt and 0 < self._prompt < windows.shape[1]:
            edges.insert(1, fed.until(self._prompt))
        hidden = torch.cat([self._head.hidden(ids[:, a:b], cache) for a, b in pairwise(edges)], 1)
        if inserted:  # what precedes each token of the window
            hidden = hidden.index_select(1, torch.from_numpy(fed.places[1:] - 1).to(device))
        nll = self._head.nll(hidden, own)
        again = edges[1] if self.policy.rereads and len(edges) > 2 else 0
        self.spent += ids.numel() + len(ids) * again
        self._cache = cache
        self._fed.append(fed)
        return nll

    def bytes_resident(self) -> int:
        """Bytes per sequence of the packed cache of the last windows, over the real tensors."""
        assert self._cache is not None
        return sum(group.pack().nbytes for group in self._cache.groups)

    def anchored(self) -> Anchored | None:
        """What anchors make of the whole windows; None if the policy has none."""
        if self.policy.anchors is None:
            return None
        sizes = layout(self.policy, self._loaded.shape)
        which = [flags(self._loaded, self.policy, fed.ids) for fed in self._fed]
        found = [
            text_bytes(sizes, x, fed.until(self._prompt))
            for x, fed in zip(which, self._fed, strict=True)
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
        layers = [] if self._cache is None else self._cache.held
        return {k: v for layer in layers for k, v in layer.impls.items()}


def deployed(loaded: LoadedModel, policy: Policy, **options: Any) -> PolicyCache:
    """The cache of a loaded model, whose tokenizer says which tokens are anchors."""
    return PolicyCache(policy, loaded.model, tokenizer=loaded.tokenizer, **options)


@contextmanager
def finite(policy: Policy, of: str) -> Iterator[None]:
    """Say that attention is not finite, where a loop over sums of it finds that out.

    Args:
        policy: what is replayed.
        of: what is read.
    """
    try:
        yield
    except ZeroDivisionError as error:
        name = policy.name or policy.fingerprint()
        raise KvsearchError(
            f"policy {name} met attention that is not finite on {of}: {NOT_FINITE}"
        ) from error
