"""Decode speed on a CPU: deployed policies against the full cache, in interleaved pairs.

    python studies/2026-11-decode-cpu/measure.py [--context 1300 ...] [--threads 1 ...]

SmolLM2-135M in fp32. Both caches take in the same text. Then each pair decodes the next tokens with
one, then with the other: at least a whole interval with the policy, so that every half has its
compactions, and fewer with the full cache, which has none to wait for. Wall seconds count where the
machine is idle; CPU seconds of one thread (of the whole process, prompts not included) also where
it is not. `load` is the machine's load average before the pairs, this process included.
Rows replace those of the same policy, context and threads in results.csv beside this file.
"""

import csv
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kvsearch.cache.huggingface import PolicyCache, full_cache
from kvsearch.files import write_atomic
from kvsearch.models import load_model
from kvsearch.policy import Policy, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.workloads.text import builtin, tokenize, windows

HERE = Path(__file__).parent
FOUND = HERE.parent / "2026-11-outcome" / "b256" / "best.json"
FIRST = HERE.parent / "2026-11-first-command" / "records" / "built-in" / "measured.json"
WARM, PLAIN = 4, 16  # tokens before the clock starts, and of the full cache's half of a pair
LEAST = 8  # tokens in a cache that is as good as empty: what the model itself takes
KEYS = ("policy", "context", "threads")


@click.command()
@click.option("--context", multiple=True, type=int, default=(1300, 7600), show_default=True)
@click.option("--threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option(
    "--policy",
    "names",
    multiple=True,
    default=("found at 256", "first command", "xmu"),
    show_default=True,
    help="that of the outcome study, that of the first command, or a method at 256 slots' bytes",
)
@click.option("--pairs", default=4, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "results.csv")
def main(
    context: tuple[int, ...],
    threads: tuple[int, ...],
    names: tuple[str, ...],
    pairs: int,
    out: Path,
) -> None:
    """Measure, and write each row when it is known."""
    loaded = load_model()
    tokens = tokenize(loaded.tokenizer, builtin())
    for T in context:
        for name in names:
            policy = chosen(name, loaded, T)
            for row in rows(loaded, policy, name, tokens, T, threads, pairs):
                click.echo(", ".join(f"{key} {value}" for key, value in row.items()))
                keep(out, row)


def chosen(name: str, loaded: Any, T: int) -> Policy:
    """The policy of a name."""
    if name == "found at 256":
        return Policy.from_json(FOUND)
    if name == "first command":
        measured = json.loads(FIRST.read_text())
        row = next(r for r in measured["rows"] if r["name"] == measured["recommended"])
        return Policy.model_validate(row["policy"])
    return at(name, Setting(loaded.shape, loaded.shape.budget_bytes(256), T))


def rows(
    loaded: Any, policy: Policy, name: str, tokens: Any, T: int, threads: tuple[int, ...],
    pairs: int,
) -> Iterator[dict[str, object]]:  # fmt: skip
    """Pairs with each number of threads, after one prompt."""
    steps = -(-PLAIN // policy.interval) * policy.interval
    total = T + WARM + len(threads) * pairs * steps
    ids = torch.from_numpy(windows(tokens, count=1, length=total))
    mine, full = PolicyCache(policy, loaded.model), full_cache(loaded.model)
    with torch.inference_mode():
        for cache in (mine, full):
            loaded.model.base_model(ids[:, :T], past_key_values=cache, use_cache=True)
            decode(loaded, cache, ids[:, T : T + WARM])
        start = T + WARM
        for count in threads:
            torch.set_num_threads(count)
            load, seconds, least = os.getloadavg()[0], [], full_cache(loaded.model)
            decode(loaded, least, ids[:, :LEAST])
            model = decode(loaded, least, ids[:, LEAST : LEAST + PLAIN])[0]
            for pair in range(pairs):
                both = {}
                for cache, n in ((mine, steps), (full, PLAIN))[:: 1 if pair % 2 else -1]:
                    both[cache is full] = decode(loaded, cache, ids[:, start : start + n])
                seconds.append((both[False], both[True]))
                start += steps
            yield row(name, T, count, load, np.array(seconds), mine, model)


def decode(loaded: Any, cache: Any, part: torch.Tensor) -> tuple[float, float]:
    """Wall and CPU seconds per token of decoding `part` `[1, steps]` one by one."""
    wall, cpu = time.perf_counter(), time.process_time()
    for i in range(part.shape[1]):
        loaded.model(part[:, i : i + 1], past_key_values=cache, use_cache=True)
    n = part.shape[1]
    return (time.perf_counter() - wall) / n, (time.process_time() - cpu) / n


def row(
    name: str, T: int, threads: int, load: float, seconds: Any, cache: PolicyCache, model: float
) -> Any:  # fmt: skip
    """One tidy row of `seconds` `[pairs, 2, 2]`: mine and full, wall and CPU."""
    wall, cpu = (seconds[:, 1, i] / seconds[:, 0, i] for i in (0, 1))
    mine, full = np.median(seconds, 0)
    seen = cache.get_seq_length()
    held = layout(cache.policy, cache.shape).bytes_at(seen, T)
    assert cache.bytes_resident == held, (cache.bytes_resident, held)
    ran = sorted({f"{op} {impl}" for group in cache.groups for op, impl in group.impls.items()})
    return {
        "policy": name, "context": T, "threads": threads, "pairs": len(seconds),
        "tokens_per_s": f"{1 / mine[0]:.1f}", "full_tokens_per_s": f"{1 / full[0]:.1f}",
        "model_tokens_per_s": f"{1 / model:.1f}", "ratio": f"{np.median(wall):.2f}",
        "lowest": f"{wall.min():.2f}", "highest": f"{wall.max():.2f}",
        "cpu_ms": f"{1000 * mine[1]:.1f}", "full_cpu_ms": f"{1000 * full[1]:.1f}",
        "cpu_ratio": f"{np.median(cpu):.2f}", "bytes": cache.bytes_resident, "load": f"{load:.1f}",
        "ran": "; ".join(ran), "torch": torch.__version__, "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def keep(file: Path, new: dict[str, Any]) -> None:
    """Put a row in its place."""
    old = list(csv.DictReader(file.open(newline=""))) if file.exists() else []
    same = [str(new[key]) for key in KEYS]
    table = [r for r in old if [r[key] for key in KEYS] != same] + [new]
    table.sort(key=lambda r: (str(r["policy"]), int(r["context"]), int(r["threads"])))
    lines = [",".join(new), *(",".join(str(r[key]) for key in new) for r in table)]
    write_atomic(file, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
