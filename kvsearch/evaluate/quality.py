"""Teacher-forced NLL of a policy: one forward pass that replays the deployed cache.

Every policy decides in a layer from that layer's own quantities, so a pass that takes all tokens
through layer after layer sees exactly what a cache filled token by token would hold at every step
(`LayerState.advance` does not depend on how a stream is cut).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.errors import KvsearchError, ModelError
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy

ROWS = 512  # tokens whose logits are held at once

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Quality:
    """NLL of one policy on windows of one text.

    Attributes:
        nll: nats per token `[W, T - 1]` fp32; entry t is the NLL of token t + 1.
        bytes_resident: bytes per sequence held after the last token, summed over the real tensors
            of the packed cache.
        seconds: wall time.
        impls: which implementation of each op ran.
    """

    nll: NDArray[np.float32]
    bytes_resident: int
    seconds: float
    impls: dict[str, str]


class Evaluator:
    """Evaluates policies on one loaded model.

    Args:
        loaded: the model.
        batch: windows that share a forward pass.
    """

    def __init__(self, loaded: LoadedModel, batch: int = 1) -> None:
        self.loaded, self.batch = loaded, batch
        self._head = _Head(loaded.model)

    def quality(
        self,
        policy: Policy,
        windows: NDArray[np.int64],
        *,
        prompt: int = 0,
        resident: bool = True,
        progress: Progress | None = None,
        **options: Any,
    ) -> Quality:
        """Replay `policy` over token windows `[W, T]`.

        Args:
            policy: what to replay.
            windows: token ids; each window starts from an empty cache.
            prompt: tokens that one call brings in before streaming starts; only policies whose
                trigger is a prompt tell the difference.
            resident: also build the packed cache of the last window and measure its bytes.
            progress: called with the number of tokens done.
            options: passed to `PolicyCache`.
        """
        start = time.perf_counter()
        nll, cache = [], None
        with torch.inference_mode():
            for i in range(0, len(windows), self.batch):
                ids = torch.from_numpy(windows[i : i + self.batch]).to(self.loaded.device)
                cache = PolicyCache(policy, self.loaded.model, packed=False, **options)
                nll.append(self._window(ids, cache, prompt).cpu())
                if progress is not None:
                    progress(ids.numel())
        held = 0
        if resident and cache is not None:
            held = sum(state.pack().nbytes for state in cache.states)
        impls = {} if cache is None else {k: v for s in cache.states for k, v in s.impls.items()}
        return Quality(torch.cat(nll).numpy(), held, time.perf_counter() - start, impls)

    def _window(self, ids: Tensor, cache: PolicyCache, prompt: int) -> Tensor:
        first = prompt if cache.policy.trigger != "stream" and prompt else ids.shape[1]
        hidden = []
        for start, stop in ((0, first), (first, ids.shape[1])):
            if start < stop:
                try:
                    hidden.append(self._head.hidden(ids[:, start:stop], cache))
                except torch.OutOfMemoryError as e:
                    raise ModelError(
                        f"out of memory with windows of {ids.shape[1]} tokens; lower --context"
                    ) from e
        return self._head.nll(torch.cat(hidden, 1), ids)


class _Head:
    """Logits in slices, so that long windows need no `T x vocabulary` tensor."""

    def __init__(self, model: Any) -> None:
        self.model, self.body, self.out = model, model.base_model, model.get_output_embeddings()
        cfg = model.config.get_text_config(decoder=True)
        self.cap = getattr(cfg, "final_logit_softcapping", None)
        self.factor = float(getattr(cfg, "logit_scale", None) or 1.0)
        self.factor /= float(getattr(cfg, "logits_scaling", None) or 1.0)
        self._verify()

    def _verify(self) -> None:
        """The slices must be the model's own logits; a family with a head of its own is refused."""
        device = next(self.model.parameters()).device
        ids = torch.arange(4, device=device)[None]
        with torch.inference_mode():
            mine = self.logits(self.body(ids, use_cache=False).last_hidden_state)
            theirs = self.model(ids, use_cache=False).logits.float()
        if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-3):
            raise ModelError(
                f"{type(self.model).__name__} computes its logits in a way kvsearch does not know"
            )

    def hidden(self, ids: Tensor, cache: PolicyCache) -> Tensor:
        """Last hidden states `[B, T, hidden]`."""
        result: Tensor = self.body(ids, past_key_values=cache, use_cache=True).last_hidden_state
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[B, T, vocabulary]` in fp32."""
        x: Tensor = self.out(hidden).float() * self.factor
        return x if self.cap is None else self.cap * torch.tanh(x / self.cap)

    def nll(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """NLL of tokens 1 .. T-1 `[B, T - 1]`."""
        parts = []
        for start in range(0, ids.shape[1] - 1, ROWS):
            stop = min(start + ROWS, ids.shape[1] - 1)
            logits = self.logits(hidden[:, start:stop])
            target = ids[:, start + 1 : stop + 1]
            parts.append(
                torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")
            )
        return torch.cat(parts, 1)


def stepwise(
    loaded: LoadedModel, policy: Policy, ids: NDArray[np.int64], *, prompt: int = 1, **options: Any
) -> tuple[NDArray[np.float32], PolicyCache]:
    """The oracle: fill a deployed cache token by token. Slow; tests and `eval --stepwise` use it.

    Returns:
        NLL `[W, T - 1]` and the cache as it stands after the last token.
    """
    cache = PolicyCache(policy, loaded.model, packed=True, **options)
    x = torch.from_numpy(ids).to(loaded.device)
    head = _Head(loaded.model)
    hidden, start = [], 0
    with torch.inference_mode():
        while start < x.shape[1]:
            stop = start + (prompt if start == 0 else 1)
            hidden.append(head.hidden(x[:, start:stop], cache))
            start = stop
        return head.nll(torch.cat(hidden, 1), x).cpu().numpy(), cache


def check_finite(name: str, quality: Quality) -> None:
    """Raise if a policy produced numbers that are no numbers."""
    if not np.isfinite(quality.nll).all():
        raise KvsearchError(f"policy {name} gave an NLL that is not finite")
