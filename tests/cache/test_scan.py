"""The fast ways through a scored stream decide and hold exactly what the segments do."""

from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch

from kvsearch.cache.layer import Layer
from kvsearch.cache.ways import advance
from kvsearch.errors import PolicyError
from kvsearch.policy import ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.rules import RULES, Attention, Need, Place, Rule, Scorer, Slots
from kvsearch.rules.attention import AttentionScorer

B, HQ, H, D, T = 2, 6, 2, 16, 150
SHAPE = ModelShape(1, H, D, HQ)
K4 = dict(tiers=(Tier(key_bits=4, value_bits=2),), quantizer=Quantizer(group=8))
SINKS16 = dict(
    tiers=(Tier(key_bits=8, value_bits=4),), quantizer=Quantizer(group=16, fp16_sinks=True)
)
XMU, DECAY = Attention(alpha=1, beta=1), Attention(alpha=1, beta=0.5, horizon=20, kind="decay")
POLICIES: dict[str, dict[str, Any]] = {
    "one token": dict(slots=40, rule=Attention()),
    "one token, protected": dict(slots=40, sinks=3, recent_window=9, rule=XMU, **K4),
    "one token, 16-bit sinks": dict(slots=40, sinks=3, rule=DECAY, **SINKS16),
    "newest may go": dict(slots=41, interval=7, rule=Attention(horizon=3), **K4),
    "some of the newest may go": dict(
        slots=41, interval=7, sinks=2, recent_window=3, rule=XMU, **K4
    ),
    "newest stay": dict(
        slots=40, interval=8, sinks=2, recent_window=8, rule=Attention(), **SINKS16
    ),
    "a recent window above the interval": dict(slots=40, interval=5, recent_window=19, rule=DECAY),
    "heads vote together": dict(slots=40, interval=6, rule=Attention(beta=1, share="layer"), **K4),
    "last row": dict(slots=40, rule=Attention(horizon=1, share="layer")),
    "window over three intervals": dict(slots=44, interval=6, rule=Attention(beta=1, horizon=18)),
    "literal": dict(slots=44, interval=6, rule=Attention(beta=1, horizon=18, literal=True)),
    "smoothed": dict(
        slots=40, interval=8, sinks=1, recent_window=8, rule=Attention(horizon=8, pool=5)
    ),
    "smoothed maxima": dict(
        slots=40, interval=8, recent_window=3, rule=Attention(pool=3, pool_kind="max"), **K4
    ),
    "interval above the target": dict(slots=40, interval=32, sinks=2, rule=XMU, **K4),
    "never full": dict(slots=300, interval=8, rule=XMU, **K4),
    "prompt": dict(slots=40, interval=8, rule=Attention(horizon=8), trigger="prompt+stream", **K4),
}


def made(policy: Policy, **how: Any) -> Layer:
    return Layer(policy, layout(policy, SHAPE).layers, **{"native": torch.float64, **how})


def tokens(seed: int = 0, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, h, tokens, D, dtype=torch.float64) for h in (HQ, H, H))
    return 2 * q, k, v


def replay(
    layer: Layer, stream: tuple[torch.Tensor, ...], cuts: list[int], cap: float | None
) -> torch.Tensor:
    parts = []
    for a, b in pairwise([0, *cuts, stream[0].shape[2]]):
        q, k, v = (x[:, :, a:b] for x in stream)
        parts.append(advance(layer, q, k, v, scale=0.3, softcap=cap))
    return torch.cat(parts, 2)


def assert_same(one: Layer, other: Layer) -> None:
    (fast,), (slow,) = one.groups, other.groups
    assert one.seen == other.seen
    assert (fast.store.n, fast.store.residual) == (slow.store.n, slow.store.residual)
    for x, y in zip(fast.store.read(), slow.store.read(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    a, b = fast.store.slot_pools(), slow.store.slot_pools()
    assert bool((a == b).all())
    assert isinstance(fast.scorer, AttentionScorer) and isinstance(slow.scorer, AttentionScorer)
    torch.testing.assert_close(fast.scorer.sums, slow.scorer.sums, rtol=1e-4, atol=1e-5)
    assert fast.scorer.sums.dtype == slow.scorer.sums.dtype
    assert (fast.scorer.born is None) == (slow.scorer.born is None)
    if fast.scorer.born is not None and slow.scorer.born is not None:
        assert torch.equal(fast.scorer.born, slow.scorer.born)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", POLICIES)
def test_in_16_bits_only_the_result_is_rounded(name: str, dtype: torch.dtype) -> None:
    """Rounded probabilities, of which a row no longer adds up to 1, would evict other slots."""
    policy = Policy(**POLICIES[name])
    fast, slow = (made(policy, packed=False, fast=f, native=dtype) for f in (True, False))
    stream, cuts = tuple(x.to(dtype) for x in tokens()), [60] if "trigger" in POLICIES[name] else []
    got, want = (replay(s, stream, cuts, 4.0) for s in (fast, slow))
    torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert_same(fast, slow)


@pytest.mark.parametrize(
    "name", ["last row", "newest may go", "a recent window above the interval"]
)
def test_of_equal_scores_the_oldest_goes(name: str) -> None:
    q, k, v = tokens()
    stream = (q, torch.zeros_like(k), v)  # all keys alike
    policy = Policy(**POLICIES[name])
    equal = policy.model_copy(update={"rule": Attention(horizon=1)})
    fast, slow = (made(equal, packed=False, fast=f) for f in (True, False))
    got, want = replay(fast, stream, [], None), replay(slow, stream, [], None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    newest = v[:, :, T - slow.groups[0].store.n :]
    if policy.tiers[0].native:
        assert torch.equal(fast.groups[0].store.read()[1], newest)
    assert fast.impls.get("evict_in_place") == ("numba" if name == "last row" else "reference")
    assert_same(fast, slow)


class Own(Scorer):
    """Sums that the fast ways know nothing of."""

    def row_weights(self, visible: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        return visible.float() ** 0


class Newest(AttentionScorer):
    def ranks(self, slots: Slots) -> torch.Tensor:
        return 1 / (1 + super().ranks(slots))


class Promises(Rule):
    name: str = "promises"
    needs: ClassVar[frozenset[Need]] = frozenset({"attention"})
    fast: ClassVar[frozenset[str]] = frozenset({"scan"})

    def scorer(self, place: Place) -> Scorer:
        return Own()


class Inherits(Attention):
    name: str = "inherits"

    def scorer(self, place: Place) -> AttentionScorer:
        return Newest(self, place)


@pytest.mark.parametrize(
    ("rule", "part"), [(Promises, "Own is none"), (Inherits, r"Newest has ranks\(\) of its own")]
)
@pytest.mark.parametrize("interval", [1, 4])
def test_a_promise_of_scan_that_a_scorer_does_not_keep_is_named(
    rule: type[Rule], part: str, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in an AssertionError, or ranks of its own were passed over."""
    monkeypatch.setitem(RULES, rule().name, rule)
    policy = Policy(slots=40, interval=interval, rule=rule())
    for packed in (False, True):
        held = made(policy, packed=packed)
        with pytest.raises(PolicyError, match=part + r".*set fast = frozenset\(\)"):
            replay(held, tokens(), [], None)
