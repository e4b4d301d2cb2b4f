"""Decode speed of a deployed policy against the full cache, in interleaved pairs.

Both caches are filled with the same context. Then each pair decodes the next tokens with one, then
with the other, so that a drifting machine slows both alike.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.cache.cuda.graphs import Decoded, cuda_graphs, serves
from kvsearch.cache.huggingface import PolicyCache, full_cache
from kvsearch.errors import ModelError, TextError
from kvsearch.evaluation.anchored_tokens import feed
from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import body
from kvsearch.policy import Policy, layout
from kvsearch.results.records import Throughput

WARM = 4  # tokens decoded before the clock starts
PROVED = 8  # beside an interval, until a CUDA graph has been compared with its launches twice
PLAIN = 16  # tokens of the full cache's half of a pair, at most: it has no compactions to wait for


def needed(context: int, pairs: int, steps: int, warm: int = WARM) -> int:
    """How many tokens a measurement takes."""
    return context + warm + pairs * steps


def warm(policy: Policy, graphs: bool) -> int:
    """Tokens decoded before the clock starts, with CUDA graphs or without."""
    return policy.interval + PROVED if graphs else WARM


def measure(
    loaded: LoadedModel,
    policy: Policy,
    ids: NDArray[np.int64],
    *,
    context: int,
    pairs: int = 5,
    steps: int = 16,
    graphs: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Throughput:
    """Time decoding after `context` tokens.

    Args:
        loaded: the model.
        policy: what the deployed cache holds.
        ids: tokens `[N]`; `needed(context, pairs, steps, warm(policy, graphs))` of them.
        context: tokens in the cache when warming up starts.
        pairs: timed pairs, after a few tokens of each that are not counted.
        steps: tokens decoded per half of a pair; the full cache decodes `PLAIN` at most.
        graphs: decode with replays of CUDA graphs, from a full cache too, which then is ours.
        progress: called after each pair.

    Returns:
        Medians and quartiles over pairs, in tokens per second of one sequence.

    Raises:
        ModelError: there can be no CUDA graphs of this model.
    """
    if graphs:
        require_graphs(loaded)
    first = warm(policy, graphs)
    need = needed(context, pairs, steps, first)
    if len(ids) < need:
        raise TextError(f"{len(ids)} tokens are too few to time {need}; lower --context")
    fed = feed(loaded, policy, np.asarray(ids[:need])).ids[:need]
    x = torch.from_numpy(fed).to(loaded.device)[None]
    mine = PolicyCache(policy, loaded.model, packed=True, tokenizer=loaded.tokenizer)
    full = PolicyCache(Policy(), loaded.model) if graphs else full_cache(loaded.model)
    brief = min(steps, PLAIN)
    times: dict[str, list[float]] = {"mine": [], "full": []}
    repeated = {"mine": 0, "full": 0}
    replays = cuda_graphs(loaded.model) if graphs else nullcontext(Decoded())
    with torch.inference_mode(), replays as decoded:
        for cache in (mine, full):
            body(loaded.model)(x[:, :context], past_key_values=cache, use_cache=True)
        for cache in (mine, full):
            _decode(loaded, cache, x[:, context : context + first])
        for pair in range(pairs):
            start = context + first + pair * steps
            order = ("mine", "full") if pair % 2 else ("full", "mine")
            for name in order:
                cache, n = (mine, steps) if name == "mine" else (full, brief)
                before = decoded.repeated
                times[name].append(_decode(loaded, cache, x[:, start : start + n]) / n)
                repeated[name] += decoded.repeated - before
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
        replayed=repeated["mine"] / (pairs * steps) if graphs else None,
        full_replayed=repeated["full"] / (pairs * brief) if graphs else None,
    )


def require_graphs(loaded: LoadedModel) -> None:
    """Say if there can be no CUDA graphs of a model.

    Raises:
        ModelError: it is not on one GPU, or graphs are turned off.
    """
    if not serves(loaded.model):
        raise ModelError(
            f"--cuda-graphs needs a model on one GPU, without KVSEARCH_GRAPHS=0; this one is on "
            f"{loaded.device}"
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
        torch.cuda.synchronize(device)  # which may be another than the current one
