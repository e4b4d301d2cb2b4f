"""AdaKV's heads hold the same, in whatever calls a stream comes, one token a call among them."""

from typing import Any

import pytest
import torch

from kvsearch.cache.general import adakv
from kvsearch.cache.layers import advance
from kvsearch.cache.state import LayerState
from kvsearch.policy import Budgets, Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention
from tests.test_scan import HQ, SHAPE, D, H, assert_same

T = 260
K4: dict[str, Any] = dict(
    tiers=(Tier(key_bits=4, value_bits=2),), quantizer=Quantizer(group=8, fp16_sinks=True)
)
XMU = Attention(alpha=1, beta=1)
POLICIES: dict[str, dict[str, Any]] = {
    "every token": dict(slots=40, sinks=2, recent_window=5, rule=XMU),
    "quantised": dict(slots=44, interval=8, sinks=3, recent_window=8, rule=Attention(), **K4),
    "forgets slowly": dict(
        slots=44, interval=4, recent_window=11, rule=Attention(alpha=0.5, horizon=20, kind="decay")
    ),
    "window over three intervals": dict(
        slots=44, interval=6, sinks=1, recent_window=7, rule=Attention(beta=1, horizon=18), **K4
    ),
    "no floor": dict(slots=44, interval=8, recent_window=8, rule=XMU, floor=0.0),
    "prompt": dict(
        slots=44, interval=8, recent_window=8, rule=Attention(horizon=8), trigger="prompt+stream"
    ),
}


def heads(name: str, packed: bool = False) -> list[LayerState]:
    """Of one layer."""
    given = dict(POLICIES[name])
    budgets = Budgets(kind="adakv", floor=given.pop("floor", 0.2))
    layers = layout(Policy(budgets=budgets, **given), SHAPE).layers
    return [LayerState(x, packed=packed, native=torch.float64) for x in layers]


def replay(states: list[LayerState], sizes: list[int]) -> torch.Tensor:
    """Output of all tokens, in calls of so many.

    The first head attends to few slots, and so asks for few.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, sum(sizes), D, dtype=torch.float64) for h in (HQ, H, H))
    q[:, : HQ // H] *= 4
    pieces = zip(*(x.split(sizes, 2) for x in (q, k, v)), strict=True)
    return torch.cat([advance(states, *x, scale=0.3, softcap=4.0) for x in pieces], 2)


@pytest.mark.parametrize("name", POLICIES)
def test_heads_share_their_slots_as_they_do_token_by_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one call, and of a prompt and two turns in a deployed cache, which packs after each."""
    found: set[int] = set()
    plain = adakv.shares

    def shares(*args: Any) -> list[int]:
        got = plain(*args)
        found.update(got)
        return got

    monkeypatch.setattr(adakv, "shares", shares)
    prompt = 61 if "trigger" in POLICIES[name] else 1
    slow = heads(name)
    want = replay(slow, [prompt, *[1] * (T - prompt)])
    assert len(found) > 2  # heads have unequal shares, which change
    fast = heads(name)
    torch.testing.assert_close(replay(fast, [prompt, T - prompt]), want, rtol=0, atol=1e-9)
    for one, other in zip(fast, slow, strict=True):
        assert_same(one, other)
    packed = heads(name, packed=True)
    got = replay(packed, [61, 14, T - 75])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    assert [s.store.n for s in packed] == [s.store.n for s in slow]
