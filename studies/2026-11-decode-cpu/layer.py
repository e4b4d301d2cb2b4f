"""What one deployed layer takes for a decoded token on a CPU: in all, in its loop, at a compaction.

    python studies/2026-11-decode-cpu/layer.py [--policy NAME ...]

The policies of measure.py after a prompt of 1300 tokens; six layers take in random tokens, four
intervals each, with the model not running between them. Medians in microseconds; `loop` is the call
of the compiled loop, timed in a round of its own.
"""

import time
from statistics import median
from typing import Any
from unittest import mock

import click
import torch
from measure import chosen

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.cache.ways import advance
from kvsearch.models import load_model
from kvsearch.workloads.text import builtin, tokenize, windows
from kvsearch_kernels.numba_loops import step as loops

CONTEXT, WARM, LAYERS, INTERVALS = 1300, 8, range(0, 30, 5), 4
LOOP = "step_at"


@click.command()
@click.option(
    "--policy", "names", multiple=True, default=("found at 256", "first command", "xmu"),
    show_default=True,
)  # fmt: skip
def main(names: tuple[str, ...]) -> None:
    """Print a line for each policy."""
    torch.set_num_threads(2)
    loaded = load_model()
    ids = torch.from_numpy(
        windows(tokenize(loaded.tokenizer, builtin()), count=1, length=CONTEXT + WARM)
    )
    for name in names:
        cache = PolicyCache(chosen(name, loaded, CONTEXT), loaded.model)
        with torch.inference_mode():
            loaded.model.base_model(ids[:, :CONTEXT], past_key_values=cache)
            for i in range(CONTEXT, CONTEXT + WARM):
                loaded.model(ids[:, i : i + 1], past_key_values=cache)
            _, _, loop = rounds(cache, loaded.shape, looped=True)
            token, compaction, _ = rounds(cache, loaded.shape, looped=False)
        print(f"{name:14} token {token:4.0f}, loop {loop:4.0f}, compaction {compaction:5.0f} us")


def rounds(cache: Any, shape: Any, *, looped: bool) -> tuple[float, float, float]:
    """Medians of tokens without and with a compaction, and of the loop where that is timed."""
    plain, compacting, inside = list[float](), list[float](), list[float]()
    loop = getattr(loops, LOOP)

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        loop(*args)
        inside.append(time.perf_counter() - start)

    with mock.patch.object(loops, LOOP, timed if looped else loop):
        for layer in LAYERS:
            held = cache.held[layer]
            for _ in range(INTERVALS * cache.policy.interval):
                qkv = (
                    torch.randn(1, h, 1, shape.head_dim)
                    for h in (shape.heads, shape.kv_heads, shape.kv_heads)
                )
                q, k, v = qkv
                start = time.perf_counter()
                advance(held, q, k, v, scale=0.125)
                took = time.perf_counter() - start
                (plain if held.groups[0].store.residual else compacting).append(took)
    return tuple(1e6 * median(x or [0.0]) for x in (plain, compacting, inside))  # type: ignore


if __name__ == "__main__":
    main()
