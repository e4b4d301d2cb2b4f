"""Decode speed of a deployed policy against the full cache, in interleaved pairs.

Both caches are filled with the same context. Then each pair decodes the next tokens with one, then
with the other, so that a drifting machine slows both alike.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.cache.huggingface import PolicyCache, full_cache
from kvsearch.errors import TextError
from kvsearch.evaluate.fed import feed
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, layout
from kvsearch.records import Throughput

WARM = 4  # tokens decoded before the clock starts
PLAIN = 16  # tokens of the full cache's half of a pair, at most: it has no compactions to wait for


def needed(context: int, pairs: int, steps: int) -> int:
    """How many tokens a measurement takes."""
    return context + WARM + pairs * steps


def measure(
    loaded: LoadedModel,
    policy: Policy,
    ids: NDArray[np.int64],
    *,
    context: int,
    pairs: int = 5,
    steps: int = 16,
    progress: Callable[[int], None] | None = None,
) -> Throughput:
    """Time decoding after `context` tokens.

    Args:
        loaded: the model.
        policy: what the deployed cache holds.
        ids: tokens `[N]`; `needed(context, pairs, steps)` of them.
        context: tokens in the cache when warming up starts.
        pairs: timed pairs, after a few tokens of each that are not counted.
        steps: tokens decoded per half of a pair; the full cache decodes `PLAIN` at most.
        progress: called after each pair.

    Returns:
        Medians and quartiles over pairs, in tokens per second of one sequence.
    """
    need = needed(context, pairs, steps)
    if len(ids) < need:
        raise TextError(f"{len(ids)} tokens are too few to time {need}; lower --context")
    fed = feed(loaded, policy, np.asarray(ids[:need])).ids[:need]
    x = torch.from_numpy(fed).to(loaded.device)[None]
    mine = PolicyCache(policy, loaded.model, packed=True, tokenizer=loaded.tokenizer)
    full = full_cache(loaded.model)
    brief = min(steps, PLAIN)
    times: dict[str, list[float]] = {"mine": [], "full": []}
    with torch.inference_mode():
        for cache in (mine, full):
            loaded.model.base_model(x[:, :context], past_key_values=cache, use_cache=True)
        for cache in (mine, full):
            _decode(loaded, cache, x[:, context : context + WARM])
        for pair in range(pairs):
            start = context + WARM + pair * steps
            order = ("mine", "full") if pair % 2 else ("full", "mine")
            for name in order:
                cache, n = (mine, steps) if name == "mine" else (full, brief)
                times[name].append(_decode(loaded, cache, x[:, start : start + n]) / n)
            if progress is not None:
                progress(pair)
    a, b = np.array(times["mine"]), np.array(times["full"])
    lo, mid, hi = np.quantile(b / a, [0.25, 0.5, 0.75])
    return Throughput(
        tokens_per_s=float(1 / np.median(a)),
        full_tokens_per_s=float(1 / np.median(b)),
        ratio=float(mid),
        ratio_lo=float(lo),
        ratio_hi=float(hi),
        pairs=pairs,
        context=context,
        device=loaded.device,
        bytes_resident=mine.bytes_resident,
        full_bytes=layout(Policy(), mine.shape).bytes_at(need),
    )


def _decode(loaded: LoadedModel, cache: Any, part: torch.Tensor) -> float:
    """Seconds to decode the tokens of `part` `[1, steps]` one by one."""
    _wait(loaded.device)
    start = time.perf_counter()
    for i in range(part.shape[1]):
        loaded.model(part[:, i : i + 1], past_key_values=cache, use_cache=True)
    _wait(loaded.device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
