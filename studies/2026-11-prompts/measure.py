"""How fast a deployed cache takes in prompts, against the evaluator, in interleaved pairs.

    python studies/2026-11-prompts/measure.py [--policy NAME ...] [--pairs 2]

SmolLM2-135M in fp32, one thread. A stream is a first prompt, a few decoded tokens, a second turn
and a chunk. The evaluator takes in the same stream with the cache that it replays with (dense
values), from the same state. CPU seconds of the process, which count also where the machine is not
idle. Each pair is kept in records/; `derive.py` makes results.csv of them.
"""

import os
import platform
import time
from typing import Any

import click
import torch
from cases import NAMES, PARTS, chosen, keep, start

from kvsearch.cache.by_age import plans
from kvsearch.evaluation.replay import deployed
from kvsearch.policy import Policy, layout


@click.command()
@click.option("--policy", "names", multiple=True, help="all if none is named")
@click.option("--pairs", default=2, show_default=True)
def main(names: tuple[str, ...], pairs: int) -> None:
    """Measure, and keep each pair when it is known."""
    loaded, ids = start()
    for pair in range(pairs):
        for name in names or NAMES:
            new = rows(loaded, name, chosen(name, loaded), ids, pair)
            click.echo(", ".join(f"{k} {v}" for row in new for k, v in row.items()))
            keep("speed", name, new)


def rows(
    loaded: Any, name: str, policy: Policy, ids: torch.Tensor, pair: int
) -> list[dict[str, object]]:
    """One row for each part of the stream; who comes first alternates."""
    seconds: dict[bool, list[float]] = {}
    with torch.inference_mode():
        # loops for a CPU are compiled at their first use
        stream(loaded, deployed(loaded, policy), ids, 2 * policy.interval + 16)
        for packed in (True, False)[:: 1 if pair % 2 else -1]:
            cache = deployed(loaded, policy, packed=packed)
            seconds[packed] = stream(loaded, cache, ids)
            if packed and policy.anchors is None:  # of which bytes depend on the text
                prompt = PARTS["first prompt"] if policy.after_prompt else 0
                held = layout(policy, loaded.shape).bytes_at(ids.shape[1], prompt)
                assert cache.bytes_resident == held
    return [
        {
            "policy": name, "part": part, "tokens": count, "pair": pair,
            "deployed_cpu_s": f"{seconds[True][i]:.3f}",
            "evaluator_cpu_s": f"{seconds[False][i]:.3f}",
            "load": f"{os.getloadavg()[0]:.1f}", "torch": torch.__version__,
            "machine": platform.machine(), "date": time.strftime("%Y-%m-%d"),
        }
        for i, (part, count) in enumerate(PARTS.items())
        if part != "decoded"
    ]  # fmt: skip


def stream(loaded: Any, cache: Any, ids: torch.Tensor, most: int = 1 << 20) -> list[float]:
    """CPU seconds of each part, taken in by one cache; of each at most so many tokens."""
    seconds, seen = [], 0
    plans.forget_plans()  # which the other cache may have made
    for part, whole in PARTS.items():
        count, start = min(whole, most), time.process_time()
        for _ in range(count if part == "decoded" else 1):
            m = 1 if part == "decoded" else count
            loaded.model.base_model(ids[:, seen : seen + m], past_key_values=cache, use_cache=True)
            seen += m
        seconds.append(time.process_time() - start)
    return seconds


if __name__ == "__main__":
    main()
