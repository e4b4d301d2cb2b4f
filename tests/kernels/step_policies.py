"""The policies whose decoded tokens run on the kernels in the interpreter."""

from kvsearch.policy import Budgets, Policy, Quantizer, Tier
from kvsearch.rules import Attention
from kvsearch.rules.expected_attention import ExpectedAttention

OWN = Budgets(kind="sensitivity", weights=((0.5, 1.0, 2.0),))
ROTATED = Quantizer(levels="lloyd", rotate=True, fp16_sinks=True)
TIERS = (Tier(share=0.4, key_bits=5, value_bits=4), Tier(share=0.6, key_bits=2, value_bits=2))
POLICIES = {
    "as the tool recommends": Policy(
        slots=16, sinks=2, recent_window=4, interval=3, budgets=OWN, quantizer=ROTATED,
        tiers=(TIERS[0].model_copy(update={"share": 1.0}),), rule=Attention(alpha=1, beta=1),
    ),
    "full": Policy(),
    "positions of the cache, by votes": Policy(
        slots=16, sinks=2, recent_window=4, interval=3, budgets=OWN, tiers=TIERS,
        quantizer=Quantizer(group=32), rule=Attention(alpha=1), positions="cache",
    ),
    "keys along tokens": Policy(  # the first group is short
        slots=16, sinks=4, interval=4, budgets=OWN, tiers=(Tier(key_bits=4, value_bits=2),),
        quantizer=Quantizer(group=4, along="tokens", fp16_sinks=True),
    ),
    "queries": Policy(
        slots=16, sinks=2, recent_window=4, interval=3, budgets=OWN, rule=ExpectedAttention(),
    ),
}  # fmt: skip
