"""The policies whose decoded tokens run on the kernels in the interpreter."""

from kvsearch.policy import Budgets, HeadTiers, Policy, Quantizer, Tier
from kvsearch.rules import Attention
from kvsearch.rules.expected_attention import ExpectedAttention

OWN = Budgets(kind="sensitivity", weights=((0.5, 1.0, 2.0),))
ROTATED = Quantizer(levels="lloyd", rotate=True, fp16_sinks=True)
TIERS = (Tier(share=0.4, key_bits=5, value_bits=4), Tier(share=0.6, key_bits=2, value_bits=2))
OTHER = HeadTiers(
    others=((Tier(key_bits=8, value_bits=4),), (Tier(share=0.5), Tier(share=0.5, key_bits=4))),
    of=((0, 1, 2),),
)
POLICIES = {
    "as the tool recommends": Policy(
        slots=30, sinks=2, recent_window=4, interval=3, budgets=OWN, quantizer=ROTATED,
        tiers=(TIERS[0].model_copy(update={"share": 1.0}),), rule=Attention(alpha=1, beta=1),
    ),
    "tiers of heads, two votes": Policy(
        slots=30, sinks=2, recent_window=4, interval=3, budgets=OWN, quantizer=ROTATED,
        tiers=TIERS, head_tiers=OTHER, rule=Attention(alpha=0.5, horizon=2, share="layer"),
    ),
    "tiers of heads by age": Policy(
        slots=30, interval=4, budgets=OWN, tiers=TIERS,
        quantizer=Quantizer(group=32, rotate=True, value_block=16),
        head_tiers=OTHER,
    ),
    "decay": Policy(
        slots=30, recent_window=4, interval=3, budgets=OWN,
        rule=Attention(horizon=20, kind="decay"),
    ),
    "full": Policy(),
    "positions of the cache, by age": Policy(
        slots=30, sinks=2, interval=4, budgets=OWN, tiers=TIERS, quantizer=ROTATED,
        positions="cache",
    ),
    "positions of the cache, by votes": Policy(
        slots=30, sinks=2, recent_window=4, interval=3, budgets=OWN, tiers=TIERS,
        quantizer=Quantizer(group=32), rule=Attention(alpha=1), positions="cache",
    ),
    "keys along tokens": Policy(  # the first group is short
        slots=30, sinks=4, interval=4, budgets=OWN, tiers=(Tier(key_bits=4, value_bits=2),),
        quantizer=Quantizer(group=4, along="tokens", fp16_sinks=True),
    ),
    "queries": Policy(
        slots=30, sinks=2, recent_window=4, interval=3, budgets=OWN, rule=ExpectedAttention(),
    ),
}  # fmt: skip
