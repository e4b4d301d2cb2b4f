"""Host time of `Op.record` for a decoded token: what asking `auto` costs before a kernel starts.

    python kernels/bench/host.py

It takes no GPU: `why_not` of the Triton implementation looks at tensors on the CPU, as Triton's
interpreter would take them, the proof counts as given, and nothing runs. The fastest of several
rounds of calls is printed, in microseconds per call; the aim is 60. What a launch itself costs the
host is not in it.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
for folder in (Path(__file__).parents[1], Path(__file__).parents[2]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402

from kvsearch.cache.layer import Layer  # noqa: E402
from kvsearch.cache.model.rotary import Rotary  # noqa: E402
from kvsearch.cache.ways import advance  # noqa: E402
from kvsearch.policy import HeadLosses, ModelShape, layout  # noqa: E402
from kvsearch.policy_space import Setting  # noqa: E402
from kvsearch.policy_space.methods import at  # noqa: E402
from kvsearch_kernels import trust  # noqa: E402
from kvsearch_kernels.op import Op  # noqa: E402

METHODS = ("window+int4", "h2o+int4", "xmu", "rotated+heads")
SHAPE = ModelShape(layers=2, kv_heads=4, head_dim=64, heads=12)
TOKENS, CALLS, ROUNDS = 700, 200, 10


def asked(name: str) -> dict[str, tuple[Op[Any, Any], tuple[Any, ...], dict[str, Any]]]:
    """What a decoded token asks of each op under a method: the last call in a layer."""
    setting = Setting(SHAPE, SHAPE.budget_bytes(256), 4096, heads=losses())
    rotary = Rotary(torch.linspace(0.1, 1, SHAPE.head_dim // 2))
    policy = at(name, setting)
    parts = [part for part in layout(policy, SHAPE).layers if part.layer == 1]
    layer = Layer(policy, parts, packed=True, rotary=rotary)
    found: dict[str, Any] = {}
    forward = Op._forward

    def noted(op: Op[Any, Any], impl: str, *args: Any, **kwargs: Any) -> Any:
        found[op.name] = op, args, kwargs
        return forward(op, impl, *args, **kwargs)

    with torch.inference_mode():
        for m in (TOKENS, 1):
            q, k, v = (torch.randn(1, h, m, SHAPE.head_dim) for h in (12, 4, 4))
            found.clear()
            with mock.patch.object(Op, "_forward", noted):
                advance(layer, q, k, v, scale=0.125)
    return found


def losses() -> HeadLosses:
    """Heads that differ, so that each is stored by itself."""
    sizes, bits, each = (16, 64, 256, 1024), (8, 4, 3, 2), [0.5 + i for i in range(8)]
    return HeadLosses(
        SHAPE.kv_heads, sizes, tuple(tuple(x / s for s in sizes) for x in each), bits,
        *(tuple(tuple(x * f * 4.0**-b for b in bits) for x in each) for f in (1, 2)), starved=16,
    )  # fmt: skip


def microseconds(op: Op[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Of one `record` in which nothing runs."""
    module, ran, rounds = op._module("triton"), dict[str, str](), []
    trust._verdicts[op.name, op.impls["triton"], *trust.subject(*args, **kwargs)] = None
    with (
        mock.patch.object(module, "emulated", lambda: False),
        mock.patch.object(Op, "_forward", lambda *_, **__: None),
    ):
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(CALLS):
                op.record(ran, *args, **kwargs)
            rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    assert ran[op.name] == "triton", op._why_not("triton", *args, **kwargs)
    return min(rounds)


def main() -> None:
    """A line for each method and op."""
    for name in METHODS:
        for op, args, kwargs in asked(name).values():
            if "triton" in op.impls:
                cost = microseconds(op, args, kwargs)
                print(f"{name:14} {op.name:14} {cost:6.1f} us", flush=True)


if __name__ == "__main__":
    main()
