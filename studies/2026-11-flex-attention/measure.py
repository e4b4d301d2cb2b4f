"""FlexAttention, compiled for a CPU, against `cache/by_age` on one layer: numbers and CPU time.

    python studies/2026-11-flex-attention/measure.py

SmolLM2-135M's heads, 1536 tokens, fp32, one thread; milliseconds, least of five. Needs a C++
compiler. Writes nothing.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kvsearch.cache.by_age.plans import plan
from kvsearch.cache.layer import Layer
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.policy import Anchors, ModelShape, Policy, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch_kernels.lifetime_attention import lifetime_attention

T, EVERY, SCALE = 1536, 32, 0.125
SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)


def least(run: Callable[[], object]) -> str:
    """Least CPU time of five calls, in milliseconds."""
    found = []
    for _ in range(5):
        begin = time.process_time()
        run()
        found.append(time.process_time() - begin)
    return f"{1000 * min(found):.0f}"


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, T, 64) for heads in (9, 3, 3))
    lacache = at("lacache", Setting(SHAPE, SHAPE.budget_bytes(256), T))
    cases = {
        "window": Policy(slots=256, sinks=4, interval=8),
        "ladder": lacache.model_copy(update={"positions": "original"}),
        "anchors": Policy(sinks=1, anchors=Anchors(at=EVERY)),
    }
    flex = torch.compile(flex_attention, dynamic=False)
    for name, policy in cases.items():
        part, anchored = layout(policy, SHAPE).layers[15], policy.anchors is not None
        lives = plan(part, T, 0, (np.arange(T) + 1) % EVERY == 0 if anchored else None)
        order = np.argsort(lives.token, kind="stable")
        birth, death = (torch.from_numpy(x[order]) for x in (lives.birth, lives.death))
        anchors = None
        if anchored:
            isolated = torch.from_numpy(lives.course.isolates[:T].copy())
            anchors = torch.where(isolated, torch.arange(T), -1)

        def seen(
            b: Tensor, h: Tensor, i: Tensor, j: Tensor,
            birth: Tensor = birth, death: Tensor = death, anchors: Tensor | None = anchors,
        ) -> Tensor:  # fmt: skip
            lives = (birth[j] <= i) & (i < death[j])
            if anchors is None:
                return lives
            return lives & ~((anchors[i] >= 0) & (anchors[j] >= 0) & (j < i))

        def masked(seen: Callable[..., Tensor] = seen) -> object:
            return create_block_mask(seen, None, None, T, T, device="cpu")

        mask = masked()

        def theirs(mask: object = mask) -> Tensor:
            return flex(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)

        def ours(policy: Policy = policy, part: Any = part, anchored: bool = anchored) -> Tensor:
            stream = None
            if anchored:
                stream = Stream(
                    lambda ids, first: (np.arange(ids.shape[1])[None] + first + 1) % EVERY == 0
                )
                stream.update(torch.zeros(1, T), 0)
            rotary = Rotary(torch.linspace(0.1, 1, 32))
            layer = Layer(policy, [part], packed=False, rotary=rotary, stream=stream)
            return advance(layer, q, k, v, scale=SCALE)

        want = lifetime_attention.run(
            "reference", q, k, v, birth, death, first_query=0, scale=SCALE, anchors=anchors
        )[0]
        off = [float((run() - want).abs().max()) for run in (theirs, ours)]
        print(
            f"{name}: FlexAttention {least(theirs)} ms, its block mask {least(masked)}, "
            f"cache/by_age {least(ours)}; off by {off[0]:.1e} and {off[1]:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
