"""A decoded token can be captured in a CUDA graph: between two steps nothing changes but data.

In the device lane every launch is noted with what a graph would fix: the kernel, its grid and
numbers, and the addresses, shapes and strides of its tensors. Two steps must be alike to the last
of them and wait for nothing. Memory that a step takes for itself is the same at every step, as a
graph's own pool gives it.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.cache.layers import advance
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.policy import Policy, Quantizer, Tier, layout
from kvsearch.policy.anchors import Anchors
from kvsearch.rules import Attention
from kvsearch_kernels.decode_step import triton_impl
from tests.launches import kernels
from tests.tagged import Device, here, tagged
from tests.test_launches import MAKES, PROMPT, SHAPE, calls, small

pytest.importorskip("triton", reason="triton is not installed")
ROTATED = Quantizer(levels="lloyd", rotate=True, fp16_sinks=True)
TIERS = (Tier(share=0.5, key_bits=4, value_bits=4), Tier(share=0.5, key_bits=2, value_bits=2))
OWN = {
    "window of rows, heads together, tiers by rank": Policy(
        slots=90, interval=16, sinks=2, recent_window=16, tiers=TIERS, quantizer=ROTATED,
        rule=Attention(alpha=0.5, beta=1, horizon=8, share="layer"),
    ),
    "positions of the cache": Policy(
        slots=90, interval=16, sinks=2, recent_window=16, tiers=TIERS, quantizer=ROTATED,
        rule=Attention(), positions="cache",
    ),
}  # fmt: skip
# most launches of a step; whether a full cache repeats its addresses across compactions
CASES = {
    "full": (3, False), "window+int4": (3, True), "h2o+int4": (4, True), "rotated+heads": (4, True),
    "window of rows, heads together, tiers by rank": (4, True), "positions of the cache": (5, True),
    "kivi4": (3, False),
}  # fmt: skip
QUICK = ("full", "h2o+int4")


class Pool:
    """Stands for torch in `decode_step`: its `empty` gives each step the memory of the others."""

    def __init__(self) -> None:
        self.held: dict[object, torch.Tensor] = {}
        self.times: Counter[object] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, **how: Any) -> torch.Tensor:
        """Memory with any content."""
        kind = (shape, *how.values())
        self.times[kind] += 1
        key = kind, self.times[kind]
        if key not in self.held:
            self.held[key] = torch.empty(*shape, **how)
        return self.held[key]


def steps(
    policy: Policy, count: int, device: Device, pool: Pool | None = None
) -> tuple[list[tuple[bool, Sequence[object]]], torch.Tensor]:
    """Decode after a prompt: whether each token compacted and what it launched, and all outputs."""
    draw, outs, found = torch.Generator().manual_seed(0), [], []
    heads = (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    with torch.inference_mode(), device:
        rotary = Rotary(tagged(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
        parts = [p for p in layout(policy, SHAPE).layers if p.layer == 1]
        states = [LayerState(part, packed=True, rotary=rotary) for part in parts]
        token = [tagged(torch.empty(1, h, 1, SHAPE.head_dim).half()) for h in heads]
        for m in (PROMPT, *[1] * count):
            new = [torch.randn(1, h, m, SHAPE.head_dim, generator=draw).half() for h in heads]
            if m == 1:  # a graph is given its input at one place
                for at, x in zip(token, new, strict=True):
                    here(at).copy_(x)
            q, k, v = token if m == 1 else [tagged(x) for x in new]
            device.trace = []
            if pool is not None:
                pool.times.clear()
            outs.append(here(advance(states, q, k, v, scale=0.2)).clone())
            found.append((states[0].store.residual == 0, device.trace))
    return found, torch.cat(outs, 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES]
)
def test_two_steps_differ_in_data_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    policy, device = OWN.get(name) or small(name), Device()
    most, repeats = CASES[name]
    count = 2 * policy.interval + 3 if policy.compacts else 4
    with kernels(device), monkeypatch.context() as patch:
        patch.setattr(triton_impl, "torch", pool := Pool())
        found, outs = steps(policy, count, device, pool)
    assert not device.waits
    plain = [trace for compacts, trace in found[-policy.interval - 2 :] if not compacts]
    assert len(plain) > 1
    for trace in plain if repeats else plain[-2:]:
        assert [op for op, _ in trace] == [op for op, _ in plain[-1]]
        assert trace == plain[-1]
        assert not [op for op, _ in trace if op in MAKES]
        assert 0 < len(trace) <= most
    with kernels(device := Device()):
        _, want = steps(policy, count, device)  # each in memory of its own
    # no step has overwritten what another still needed
    torch.testing.assert_close(outs[:, :, PROMPT:], want[:, :, PROMPT:], rtol=0, atol=0)


def test_what_slots_receive_from_a_blind_anchor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attends by other means, to the same sums; here no slot leaves with it."""
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    policy = Policy(
        slots=400,
        interval=24,
        recent_window=40,
        rule=Attention(),
        anchors=Anchors(at="given", ids=(0,), protected=(0, PROMPT + 1)),
    )
    stream = Stream(lambda ids, first: (np.arange(ids.shape[1])[None] + first) % 11 == 2)
    stream.update(torch.zeros(1, PROMPT + 30), 0)
    found, (part, *_) = [], layout(policy, SHAPE).layers
    for lane in (kernels, lambda device: nullcontext()):
        device = Device()
        with lane(device), torch.inference_mode(), device:
            rotary = Rotary(tagged(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
            state = LayerState(part, packed=True, rotary=rotary, stream=stream)
            list(calls([state], [PROMPT, *[1] * 20], device))
            sums = state.scorer.sums
        found.append(here(sums).clone())
        assert (device.launches["triton::attend_heads"] > 10) == (lane is kernels)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
