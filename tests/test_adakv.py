"""AdaKV's heads, all at once in place, decide and hold what they do one by one in segments."""

from typing import Any

import pytest
import torch

from kvsearch.cache import adakv_inplace, sharing
from kvsearch.cache.heads import advance
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


def heads(name: str, *, fast: bool, native: torch.dtype = torch.float64) -> list[LayerState]:
    """Of one layer."""
    given = dict(POLICIES[name])
    budgets = Budgets(kind="adakv", floor=given.pop("floor", 0.2))
    layers = layout(Policy(budgets=budgets, **given), SHAPE).layers
    return [LayerState(x, packed=False, native=native, fast=fast) for x in layers]


def stream() -> list[torch.Tensor]:
    """Queries, keys and values; the first head attends to few slots, and so asks for few."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, T, D, dtype=torch.float64) for h in (HQ, H, H))
    q[:, : HQ // H] *= 4
    return [q, k, v]


def replay(states: list[LayerState], cuts: list[int], cap: float | None) -> torch.Tensor:
    """Output of all tokens, given in pieces that end at `cuts`."""
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, T], strict=True)]
    native = states[0].native
    pieces = zip(*(x.to(native).split(sizes, 2) for x in stream()), strict=True)
    return torch.cat([advance(states, *x, scale=0.3, softcap=cap) for x in pieces], 2)


@pytest.mark.parametrize(("cuts", "cap"), [([], None), ([61, 75, 200], 4.0)])
@pytest.mark.parametrize("name", POLICIES)
def test_all_heads_at_once_hold_what_each_does_in_segments(
    name: str, cuts: list[int], cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def spy(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = run(*args, **kwargs)
        taken.append(out.shape[2])
        return out

    def unequal(*args: Any) -> list[int]:
        got = shares(*args)
        found.update(got)
        return got

    run, shares = adakv_inplace.run, sharing.shares
    found: set[int] = set()
    monkeypatch.setattr(adakv_inplace, "run", spy)
    monkeypatch.setattr(sharing, "shares", unequal)
    if "trigger" in POLICIES[name]:
        cuts = [61, *(c for c in cuts if c > 61)]  # the first call is the prompt
    fast, slow = heads(name, fast=True), heads(name, fast=False)
    got = replay(fast, cuts, cap)
    assert sum(taken) > 100  # otherwise nothing is compared here
    torch.testing.assert_close(
        got, replay(slow, cuts[:1] if "trigger" in POLICIES[name] else [], cap), rtol=0, atol=1e-9
    )
    assert len(found) > 2  # heads have unequal shares, which change
    for one, other in zip(fast, slow, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
def test_in_16_bits_only_the_result_is_rounded(name: str, dtype: torch.dtype) -> None:
    """As in segments: rounded probabilities would share the slots out otherwise."""
    fast, slow = (heads(name, fast=f, native=dtype) for f in (True, False))
    cuts = [61] if "trigger" in POLICIES[name] else []
    got, want = (replay(states, cuts, 4.0) for states in (fast, slow))
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for one, other in zip(fast, slow, strict=True):
        assert_same(one, other)
