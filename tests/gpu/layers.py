"""A layer fed with tokens on a real device; what `tests/cache/test_device.py` does without one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.layer import empty_layers
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.projections import Output
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.policy import ModelShape, Policy

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Layer:
    """Layer 1 under a policy, and the tokens that it is to be fed with.

    Attributes:
        held: what it holds.
        tokens: queries, keys and values of each call.
        outs: what the calls gave.
    """

    def __init__(
        self, policy: Policy, shape: ModelShape, calls: Sequence[int], device: torch.device,
        dtype: torch.dtype = torch.float32, **how: bool,
    ) -> None:  # fmt: skip
        draw = torch.Generator().manual_seed(0)
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        self.tokens = [
            [torch.randn(1, h, m, shape.head_dim, generator=draw).to(device, dtype) for h in heads]
            for m in calls
        ]
        stream = None
        if policy.anchors is not None:
            stream = Stream(lambda ids, first: (np.arange(ids.shape[1])[None] + first) % 11 == 3)
            stream.update(torch.zeros(1, sum(calls)), 0)
        rotary = Rotary(torch.linspace(0.1, 1, shape.head_dim // 2).to(device))
        weight = torch.linspace(-9, 9, 7 * shape.heads * shape.head_dim).sin().view(7, -1)
        weight = weight.to(device, dtype)
        native = torch.float16 if dtype is torch.float32 else dtype
        output = Output(weight, shape.heads // shape.kv_heads)
        every = [rotary] * shape.layers, None, [output] * shape.layers
        self.held = empty_layers(policy, shape, *every, stream=stream, native=native, **how)[1]
        self.outs: list[Tensor] = []

    @torch.inference_mode()
    def feed(self, tokens: Sequence[Tensor]) -> Tensor:
        """One call."""
        return advance(self.held, *tokens, scale=0.2)

    def run(self, each: Callable[[Callable[[], Tensor]], Tensor] = lambda call: call()) -> Tensor:
        """All calls; `each` is given every one of them."""
        for tokens in self.tokens:
            self.outs.append(each(lambda tokens=tokens: self.feed(tokens)))
        return torch.cat(self.outs, 2)


@contextmanager
def without_waits() -> Iterator[None]:
    """Torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def off(got: Tensor, want: Tensor) -> float:
    """Distance over length, in fp64 on the CPU."""
    a, b = got.cpu().double(), want.cpu().double()
    return float((a - b).norm() / b.norm())
