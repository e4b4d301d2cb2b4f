"""How fast a deployed cache takes in prompts, against the evaluator, in interleaved pairs.

    python studies/2026-11-prompts/measure.py [--policy NAME ...] [--pairs 2]

SmolLM2-135M in fp32, one thread. A stream is a first prompt, a few decoded tokens, a second turn
and a chunk. The evaluator takes in the same stream with the cache that it replays with (dense
values), from the same state. CPU seconds of the process, which count also where the machine is not
idle. Rows replace those of the same policy and part in results.csv beside this file.
"""

import os
import platform
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from cases import HERE, NAMES, PARTS, chosen, keep, start

from kvsearch.errors import PolicyError
from kvsearch.evaluate.replay import deployed
from kvsearch.policy import Policy, layout


@click.command()
@click.option("--policy", "names", multiple=True, help="all if none is named")
@click.option("--pairs", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "results.csv")
def main(names: tuple[str, ...], pairs: int, out: Path) -> None:
    """Measure, and write each row when it is known."""
    loaded, ids = start()
    for name in names or NAMES:
        try:
            policy = chosen(name, loaded)
        except PolicyError as e:
            click.echo(f"{name}: {e}")
            continue
        for row in rows(loaded, name, policy, ids, pairs):
            click.echo(", ".join(f"{key} {value}" for key, value in row.items()))
            keep(out, row)


def rows(
    loaded: Any, name: str, policy: Policy, ids: torch.Tensor, pairs: int
) -> list[dict[str, object]]:
    """One row for each part of the stream."""
    load, found = os.getloadavg()[0], []
    with torch.inference_mode():
        for packed in (True, False):  # loops for a CPU are compiled at their first use
            stream(loaded, deployed(loaded, policy, packed=packed), ids, 2 * policy.interval + 16)
        for pair in range(pairs):
            taken = {}
            for packed in (True, False)[:: 1 if pair % 2 else -1]:
                cache = deployed(loaded, policy, packed=packed)
                taken[packed] = stream(loaded, cache, ids)
                if packed and policy.anchors is None:  # of which bytes depend on the text
                    prompt = PARTS["first prompt"] if policy.prompted else 0
                    held = layout(policy, loaded.shape).bytes_at(ids.shape[1], prompt)
                    assert cache.bytes_resident == held
            found.append((taken[True], taken[False]))
    seconds = np.array(found)  # [pairs, caches, parts]
    made: list[dict[str, object]] = []
    for i, (part, count) in enumerate(PARTS.items()):
        if part == "decoded":
            continue
        ratio = seconds[:, 0, i] / seconds[:, 1, i]
        mine, theirs = np.median(seconds[:, :, i], 0)
        made.append({
            "policy": name, "part": part, "tokens": count, "pairs": pairs,
            "deployed_cpu_s": f"{mine:.2f}", "evaluator_cpu_s": f"{theirs:.2f}",
            "ratio": f"{np.median(ratio):.2f}", "lowest": f"{ratio.min():.2f}",
            "highest": f"{ratio.max():.2f}", "load": f"{load:.1f}", "torch": torch.__version__,
            "machine": platform.machine(), "date": time.strftime("%Y-%m-%d"),
        })  # fmt: skip
    return made


def stream(loaded: Any, cache: Any, ids: torch.Tensor, most: int = 1 << 20) -> list[float]:
    """CPU seconds of each part, taken in by one cache; of each at most so many tokens."""
    seconds, seen = [], 0
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
