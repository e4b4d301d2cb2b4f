"""One op that goes through all intervals evicts what torch's operations evict, one by one."""

from typing import Any

import pytest
import torch

from kvsearch.cache.heads import advance
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.policy import Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention
from kvsearch_kernels.evict_in_place import evict_in_place, numba_impl
from kvsearch_kernels.op import Op
from tests.test_device import SHAPE, small

SERVED = {
    "XMU's correction": Policy(slots=60, interval=8, rule=Attention(alpha=1, beta=1)),
    "every token": Policy(slots=60, interval=1, rule=Attention(beta=1)),
    "tova": small("tova"),
    "decay, a recent window in the way": Policy(
        slots=60, interval=4, sinks=3, recent_window=30,
        tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=16),
        rule=Attention(alpha=1, beta=1, horizon=32, kind="decay"),
    ),
    "only the last rows": Policy(slots=60, interval=8, rule=Attention(horizon=5, beta=2)),
    "sinks and quantised": Policy(
        slots=60, interval=8, sinks=4, recent_window=4, rule=Attention(alpha=0.5),
        tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=16),
    ),
}  # fmt: skip
NOT_SERVED = {
    "a window of intervals": Policy(
        slots=60, interval=4, rule=Attention(horizon=12, beta=0.5), recent_window=2
    ),
    "smoothed, one vote": Policy(
        slots=60, interval=8, recent_window=8, rule=Attention(horizon=8, pool=3, share="layer")
    ),
}


def evaluate(policy: Policy) -> torch.Tensor:
    """Outputs over a text, in one call, that goes on for many intervals in a full cache."""
    tokens = 2 * (policy.slots or 0) + 28 * policy.interval + 7
    draw = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        rotary = Rotary(torch.linspace(0.1, 1, SHAPE.head_dim // 2))
        parts = [part for part in layout(policy, SHAPE).layers if part.layer == 1]
        states = [LayerState(part, packed=False, rotary=rotary) for part in parts]
        q, k, v = (
            torch.randn(1, heads, tokens, SHAPE.head_dim, generator=draw)
            for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        )
        return advance(states, q, k, v, scale=0.2)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The op's reference serves, as a kernel would; what it is given is noted."""
    found: list[Any] = []
    pick, again = Op.pick, Op.again

    def picked(op: Op[Any, Any], *args: Any, **kwargs: Any) -> str:
        return "kernel" if op is evict_in_place else pick(op, *args, **kwargs)

    def carried_out(op: Op[Any, Any], impl: str, *args: Any, **kwargs: Any) -> Any:
        if op is not evict_in_place:
            return again(op, impl, *args, **kwargs)
        found.append(args)
        return op.reference(*args)

    monkeypatch.setattr(Op, "pick", picked)
    monkeypatch.setattr(Op, "again", carried_out)
    return found


@pytest.mark.parametrize("name", SERVED)
def test_it_evicts_what_torch_evicts(
    name: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs after the last compaction too, so what is in the slots is right."""
    got = evaluate(SERVED[name])
    assert asked
    monkeypatch.undo()
    monkeypatch.setattr(numba_impl, "why_not", lambda *_: "torch is to do it")
    want = evaluate(SERVED[name])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_what_it_does_not_serve(name: str, asked: list[Any]) -> None:
    evaluate(NOT_SERVED[name])
    assert not asked
