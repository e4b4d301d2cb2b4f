"""Teacher-forced NLL of a policy: one forward pass that replays the deployed cache.

Every policy decides in a layer from that layer's own quantities, so a pass that takes all tokens
through layer after layer sees exactly what a cache filled token by token would hold at every step
(`cache.ways.advance` does not depend on how a stream is cut).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import KvsearchError, ModelError, OutOfMemory, lacks_memory
from kvsearch.evaluation.anchored_tokens import feed
from kvsearch.evaluation.batches import Batches
from kvsearch.evaluation.divergence import Divergence
from kvsearch.evaluation.replay import Replay, deployed
from kvsearch.models.head import NOT_FINITE, Head
from kvsearch.models.load import LoadedModel
from kvsearch.models.vocabulary import require_ids
from kvsearch.policy import Policy
from kvsearch.results.measurement import Measurement

Progress = Callable[[int], None]


class Evaluator:
    """Evaluates policies on one loaded model.

    Args:
        loaded: the model.
        batch: windows that share a forward pass; None leaves it to the memory, see `Batches`.

    Attributes:
        head: body and output layer of the model.

    Raises:
        OutOfMemory: the device has no room for the activations of a few tokens.
        ModelError: the family computes its logits in a way that is not known.
    """

    def __init__(self, loaded: LoadedModel, batch: int | None = None) -> None:
        self.loaded, self.batches = loaded, Batches(loaded, batch)
        try:
            self.head = Head(loaded.model, loaded.silent)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            raise OutOfMemory(
                f"{loaded.device} has no memory left beside the model; free some, or choose a "
                "smaller model or another --device"
            ) from error

    def replay(
        self, policy: Policy, windows: NDArray[np.int64], *, prompt: int = 0, **options: Any
    ) -> Replay:
        """A replay of `policy` over token windows `[W, T]`.

        Raises:
            ModelError: the model lacks a token of the windows; and what `Replay` raises.
        """
        self._require(windows)
        return Replay(
            self.head, self.loaded, policy, windows, batches=self.batches, prompt=prompt, **options
        )

    def quality(
        self,
        policy: Policy,
        windows: NDArray[np.int64],
        *,
        prompt: int = 0,
        resident: bool = True,
        progress: Progress | None = None,
        **options: Any,
    ) -> Measurement:
        """Replay `policy` over token windows `[W, T]`.

        Args:
            policy: what to replay.
            windows: token ids; each window starts from an empty cache.
            prompt: tokens that one call brings in before streaming starts; without effect unless
                the policy's trigger is a prompt.
            resident: also build the packed cache of the last window and measure its bytes.
            progress: called with the number of tokens done.
            options: passed to `PolicyCache`.

        Raises:
            KvsearchError: a loss is not finite; and what `Replay` raises.
        """
        start = time.perf_counter()
        replay = self.replay(policy, windows, prompt=prompt, **options)
        nll = replay.nll(progress)
        check_finite(policy, nll)
        held = replay.bytes_resident() if resident else 0
        seconds = time.perf_counter() - start
        return Measurement(
            nll, replay.spent, held, seconds, replay.impls, anchored=replay.anchored()
        )

    def divergence(self, windows: NDArray[np.int64]) -> Divergence:
        """What policies lose against the full cache on token windows `[W, T]`, all in one pass."""
        self._require(windows)
        return Divergence(self.head, self.loaded, windows)

    def _require(self, windows: NDArray[np.int64]) -> None:
        require_ids(self.loaded.model, self.loaded.tokenizer, windows, "a window")


def stepwise(
    loaded: LoadedModel, policy: Policy, ids: NDArray[np.int64], *, prompt: int = 1, **options: Any
) -> tuple[NDArray[np.float32], PolicyCache]:
    """The oracle: fill a deployed cache token by token. Slow; for tests.

    Returns:
        NLL `[W, T - 1]` and the cache as it stands after the last token. Windows of policies that
        insert tokens differ in length: of those there may be one.
    """
    cache = deployed(loaded, policy, packed=True, **options)
    own = torch.from_numpy(ids).to(loaded.device)
    fed, head = feed(loaded, policy, ids[0]), Head(loaded.model, loaded.silent)
    x = own if len(fed.ids) == len(fed.places) else torch.from_numpy(fed.ids[None]).to(own)
    hidden, start = [], 0
    with torch.inference_mode():
        while start < x.shape[1]:
            stop = start + (fed.until(prompt) if start == 0 else 1)
            hidden.append(head.hidden(x[:, start:stop], cache))
            start = stop
        before = torch.from_numpy(fed.places[1:] - 1).to(own.device)
        return head.nll(torch.cat(hidden, 1)[:, before], own).cpu().numpy(), cache


def check_finite(policy: Policy, nll: NDArray[np.floating[Any]], of: str = "the text") -> None:
    """Raise if the NLL of a policy is not finite, which under the full cache is the model's fault.

    Args:
        policy: what was replayed.
        nll: its losses, of any shape.
        of: what was read.
    """
    if np.isfinite(nll).all():
        return
    if policy.evicts or policy.quantizes:
        name = policy.name or policy.fingerprint()
        raise KvsearchError(f"policy {name} gave an NLL that is not finite on {of}")
    raise ModelError(f"on {of} {NOT_FINITE}")
