"""The picture of what is held equals what the cache holds."""

import pytest

from kvsearch.cache.by_age.plans import plan as cache_plan
from kvsearch.policy import Budgets, Ladder, ModelShape, Policy, Tier, layout
from kvsearch.report.slotmap import caption, held, slot_map
from kvsearch.rules.attention import Attention

SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)
K4 = (Tier(key_bits=4, value_bits=4),)

POSITION_ONLY = [
    Policy(slots=20),
    Policy(slots=40, sinks=4, interval=8),
    Policy(slots=60, sinks=4, recent_window=8, ladder=Ladder(span=0.25, overlap=0.5)),
    Policy(
        slots=60, sinks=4, recent_window=30, interval=5, positions="cache",
        ladder=Ladder(span=0.5, overlap=0.3, order="contiguous"),
    ),
    Policy(slots=50, sinks=2, ladder=Ladder(span=0.8), budgets=Budgets(kind="pyramid", beta=3)),
    Policy(
        slots=60, sinks=4, recent_window=9, interval=16, trigger="prompt+stream",
        ladder=Ladder(span=0.5, overlap=0.5),
    ),
    Policy(slots=40, sinks=4, interval=8, trigger="prompt"),
    Policy(interval=8, tiers=K4),
]  # fmt: skip


@pytest.mark.parametrize("policy", POSITION_ONLY)
def test_slot_map_is_what_the_cache_holds(policy):
    for layer in layout(policy, SHAPE).layers[:8]:
        for tokens in (10, 61, 97, 400):
            prompt = 0 if policy.trigger == "stream" else 90
            plan = cache_plan(layer, tokens, prompt)
            assert held(layer, tokens, prompt)[0].tolist() == plan.held.tolist()


@pytest.mark.parametrize("sinks, recent, interval", [(0, 1, 1), (4, 32, 16)])
def test_the_caption_counts_one_token_as_well_as_many(sinks, recent, interval):
    policy = Policy(
        slots=64, sinks=sinks, recent_window=recent, interval=interval, rule=Attention()
    )
    said = caption(slot_map(policy, SHAPE, 512), policy)
    assert f"sinks ({sinks}); at the right: recent tokens ({recent}), then the newest" in said
    assert said.endswith(f"in 16 bits ({interval}).")
