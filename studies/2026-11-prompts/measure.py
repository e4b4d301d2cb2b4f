"""How fast a deployed cache takes in prompts, against the evaluator, in interleaved pairs.

    python studies/2026-11-prompts/measure.py [--policy NAME ...] [--pairs 3] [--memory]

SmolLM2-135M in fp32, one thread, the bytes of 256 fp16 slots. A stream is a first prompt, a few
decoded tokens, a second turn and a chunk. The evaluator takes in the same stream with the cache
that it replays with (dense values), from the same state; the full cache is what transformers has.
CPU seconds of the process, which count also where the machine is not idle. Rows replace those of
the same policy and part in results.csv beside this file. `--memory` measures the live bytes of
tensors instead, see `memory.py`.
"""

import csv
import os
import platform
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from kvsearch.cache.huggingface import full_cache
from kvsearch.errors import PolicyError
from kvsearch.evaluate.replay import deployed
from kvsearch.files import write_atomic
from kvsearch.knobs import Setting
from kvsearch.methods import METHODS, at
from kvsearch.models import load_model
from kvsearch.policy import Policy, layout
from kvsearch.text import builtin, tokenize, windows

HERE = Path(__file__).parent
OUTCOME = HERE.parent / "2026-11-outcome"
FOUND = {f"found at {n}": OUTCOME / f"b{n}" / "best.json" for n in (128, 192, 256, 384)}
PARTS = {"first prompt": 1024, "decoded": 8, "second turn": 512, "chunk": 300}
KEYS = ("policy", "part")


@click.command()
@click.option("--policy", "names", multiple=True, help="all if none is named")
@click.option("--pairs", default=3, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=HERE / "results.csv")
def main(names: tuple[str, ...], pairs: int, out: Path) -> None:
    """Measure, and write each row when it is known."""
    torch.set_num_threads(1)
    loaded = load_model()
    tokens = tokenize(loaded.tokenizer, builtin())
    ids = torch.from_numpy(windows(tokens, count=1, length=sum(PARTS.values())))
    for name in names or [*METHODS, *FOUND]:
        try:
            policy = chosen(name, loaded)
        except PolicyError as e:
            click.echo(f"{name}: {e}")
            continue
        for row in rows(loaded, name, policy, ids, pairs):
            click.echo(", ".join(f"{key} {value}" for key, value in row.items()))
            keep(out, row)


def chosen(name: str, loaded: Any) -> Policy:
    """The policy of a name."""
    if name in FOUND:
        return Policy.from_json(FOUND[name])
    budget = loaded.shape.budget_bytes(256)
    setting = Setting(loaded.shape, budget, sum(PARTS.values()), prompt=PARTS["first prompt"])
    return at(name, setting)


def rows(
    loaded: Any, name: str, policy: Policy, ids: torch.Tensor, pairs: int
) -> list[dict[str, object]]:
    """One row for each part of the stream."""
    makes = [lambda packed=p: deployed(loaded, policy, packed=packed) for p in (True, False)]
    makes.append(lambda: full_cache(loaded.model))
    load, found = os.getloadavg()[0], []
    with torch.inference_mode():
        for make in makes[:2]:  # loops for a CPU are compiled at their first use
            stream(loaded, make(), ids, 2 * policy.interval + 16)
        for pair in range(pairs):
            order = range(len(makes))[:: 1 if pair % 2 else -1]
            taken = {}
            for which in order:
                cache = makes[which]()
                taken[which] = stream(loaded, cache, ids)
                if which == 0:
                    prompt = PARTS["first prompt"] if policy.prompted else 0
                    held = layout(policy, loaded.shape).bytes_at(ids.shape[1], prompt)
                    assert policy.anchors or cache.bytes_resident == held
            found.append([taken[which] for which in range(len(makes))])
    seconds = np.array(found)  # [pairs, caches, parts]
    made = []
    for i, (part, count) in enumerate(PARTS.items()):
        if part == "decoded":
            continue
        ratio = seconds[:, 0, i] / seconds[:, 1, i]
        mine, theirs, full = np.median(seconds[:, :, i], 0)
        made.append({
            "policy": name, "part": part, "tokens": count, "pairs": pairs,
            "deployed_s": f"{mine:.2f}", "evaluator_s": f"{theirs:.2f}", "full_s": f"{full:.2f}",
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


def keep(file: Path, new: dict[str, Any]) -> None:
    """Put a row in its place."""
    old = list(csv.DictReader(file.open(newline=""))) if file.exists() else []
    same = [str(new[key]) for key in KEYS]
    table = [r for r in old if [r[key] for key in KEYS] != same] + [new]
    names, parts = [*METHODS, *FOUND], [*PARTS]
    table.sort(key=lambda r: (names.index(str(r["policy"])), parts.index(str(r["part"]))))
    lines = [",".join(new), *(",".join(str(r[key]) for key in new) for r in table)]
    write_atomic(file, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
