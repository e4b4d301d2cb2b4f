"""The most memory that a deployed cache needs while it takes in a prompt.

    python studies/2026-11-prompts/memory.py [--policy NAME ...]

The stream of `measure.py`. Every tensor that an op returns is counted while its storage lives, what
ops allocate inside themselves is not; weights are not. `nothing` is the same call of a model that
keeps nothing and attends within the call. What is allowed above that is the most bytes that the
policy may hold up to the end of the call, which is its budget where it evicts, and a dense copy of
one layer: keys and values of its slots and of the call's tokens in the model's type. `copies` is
what is really above, less the budget, in such copies. Rows are kept in records/; `derive.py` makes
memory.csv of them.
"""

import time
import weakref
from typing import Any

import click
import torch
from cases import NAMES, PARTS, chosen, keep, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvsearch.evaluation.replay import deployed
from kvsearch.policy import layout


class Live(TorchDispatchMode):
    """Counts bytes of the storages that ops return, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


@click.command()
@click.option("--policy", "names", multiple=True, help="all if none is named")
def main(names: tuple[str, ...]) -> None:
    """Measure, and keep the rows of each policy when they are known."""
    loaded, ids = start()
    bare, shape = peaks(loaded, None, ids), loaded.shape
    token = 2 * shape.kv_heads * shape.head_dim * loaded.model.dtype.itemsize  # of one layer
    for name in names or NAMES:
        policy = chosen(name, loaded)
        found, seen = peaks(loaded, deployed(loaded, policy), ids), 0
        new: list[dict[str, object]] = []
        for part, count in PARTS.items():
            seen += count
            if part == "decoded":
                continue
            peak, held, slots = found[part]
            new.append({
                "policy": name, "part": part, "tokens": count, "peak_bytes": peak,
                "nothing_bytes": bare[part][0], "held_bytes": held,
                "budget_bytes": layout(policy, shape).bytes_peak(seen, PARTS["first prompt"]),
                "dense_copy_bytes": token * (slots + count), "torch": torch.__version__,
                "date": time.strftime("%Y-%m-%d"),
            })  # fmt: skip
        click.echo(", ".join(f"{key} {value}" for row in new for key, value in row.items()))
        keep("memory", name, new)


def peaks(loaded: Any, cache: Any, ids: torch.Tensor) -> dict[str, tuple[int, int, int]]:
    """Of each part: peak bytes, most bytes held before or after, and slots of a layer before."""
    found, seen, live = {}, 0, Live()
    with torch.inference_mode(), live:
        for part, count in PARTS.items():
            before = 0 if cache is None else cache.bytes_resident
            slots = 0 if cache is None else max(group.store.n for group in cache.groups)
            live.peak = live.now
            for _ in range(count if part == "decoded" else 1):
                m = 1 if part == "decoded" else count
                held = {} if cache is None else {"past_key_values": cache}
                loaded.model.base_model(
                    ids[:, seen : seen + m], use_cache=cache is not None, **held
                )
                seen += m
            after = 0 if cache is None else cache.bytes_resident
            found[part] = live.peak, max(before, after), slots
    return found


if __name__ == "__main__":
    main()
