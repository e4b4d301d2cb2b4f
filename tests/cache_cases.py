"""The policies that the cache is tested with, a tiny model, and token ids."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import shape_of
from kvsearch.policy import (
    Budgets,
    Channels,
    HeadTiers,
    Ladder,
    Layout,
    ModelShape,
    Policy,
    Quantizer,
    Tier,
)
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import METHODS, at
from kvsearch.rules import RULES, Attention, Critical, KeyDiff, Reread, Rule
from kvsearch_kernels.codebooks import CODEBOOKS
from tests.heads import losses
from tests.importance import importance
from tests.random_policies import offset

T = 168
K4 = (Tier(key_bits=4, value_bits=4),)


Model = TypeVar("Model", bound=torch.nn.Module)


def sharp(model: Model, by: float = 3) -> Model:
    """The model, to be evaluated; a flat random one would not notice a wrong cache."""
    for p in model.eval().requires_grad_(False).parameters():
        if p.dim() > 1:
            p.mul_(by)
    return model


def tiny(
    seed: int = 0, dtype: torch.dtype = torch.float64, head_dim: int = 16, layers: int = 4
) -> LoadedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=512,
    )  # fmt: skip
    model = sharp(LlamaForCausalLM(config).to(dtype))
    return LoadedModel(model, None, shape_of(config), "tiny", "", "", None, str(dtype), "cpu")


IDS = np.random.default_rng(0).integers(0, 97, size=(2, T))
SETTING = Setting(
    ModelShape(4, 2, 16, 6),
    ModelShape(4, 2, 16, 6).budget_bytes(104),
    T,
    importance=importance(ModelShape(4, 2, 16, 6)),
    heads=losses(ModelShape(4, 2, 16, 6)),
)
PROMPT = 100  # of the policies that compact after a prompt; they hold all that follows
AFTER = replace(SETTING, budget_bytes=SETTING.shape.budget_bytes(140), prompt=PROMPT)
EXTRA: dict[str, Policy] = {
    "window interval 8": Policy(slots=32, sinks=4, interval=8),
    "window re-indexed interval 8": Policy(slots=32, sinks=4, interval=8, positions="cache"),
    "ladder original": Policy(
        slots=36, sinks=4, recent_window=8, ladder=Ladder(span=0.5, overlap=0.5),
    ),
    "ladder interval 4": Policy(
        slots=36, sinks=4, recent_window=8, interval=4, ladder=Ladder(span=0.25, overlap=0.5),
        positions="cache", budgets=Budgets(kind="pyramid", beta=4),
    ),
    "ladder in 4 bits": Policy(
        slots=40, sinks=2, recent_window=8, interval=3, ladder=Ladder(span=0.25, overlap=0.5),
        positions="cache", tiers=K4, quantizer=Quantizer(group=8, fp16_sinks=True),
    ),
    "ladder that reaches the newest tokens": Policy(
        slots=12, interval=4, recent_window=1, ladder=Ladder(span=0.25, overlap=0.5),
        budgets=Budgets(kind="sensitivity", exponent=1.0, weights=(0.1, 0.2, 1.0, 2.7)),
    ),
    "scored ladder": Policy(
        slots=48, interval=8, sinks=2, recent_window=10, rule=Attention(), ladder=Ladder(span=0.5),
    ),
    "h2o interval 8 re-indexed": Policy(
        slots=40, interval=8, recent_window=16, rule=Attention(), positions="cache",
    ),
    "h2o one token, 4 bits": Policy(
        slots=40, recent_window=8, sinks=2, rule=Attention(), tiers=K4,
        quantizer=Quantizer(group=8),
    ),
    "decay one token": Policy(
        slots=40, recent_window=1, rule=Attention(alpha=1, beta=1, horizon=20, kind="decay"),
    ),
    "window over three intervals": Policy(
        slots=50, interval=6, recent_window=4,
        rule=Attention(alpha=1, beta=1, horizon=18, share="layer"),
    ),
    "three tiers": Policy(
        slots=50, interval=7, recent_window=3, sinks=2, rule=Attention(beta=1),
        tiers=(Tier(share=0.2), Tier(share=0.4, key_bits=8, value_bits=4),
               Tier(share=0.4, key_bits=3, value_bits=2)),
        quantizer=Quantizer(group=16, rotate=True, levels="lloyd", fp16_sinks=True),
    ),
    "tiers by age": Policy(
        slots=60, interval=7, sinks=4, quantizer=Quantizer(group=8),
        tiers=(Tier(share=0.3), Tier(share=0.7, key_bits=4, value_bits=2)),
    ),
    "prompt, then stream": Policy(
        slots=48, interval=16, recent_window=8, rule=Attention(horizon=8, pool=3, pool_kind="max"),
        trigger="prompt+stream", budgets=Budgets(kind="pyramid", beta=3),
    ),
    "the prompt stays": Policy(
        slots=24, interval=4, sinks=2, recent_window=6, rule=Attention(beta=1),
        trigger="generation", tiers=K4, quantizer=Quantizer(group=8, fp16_sinks=True),
        budgets=Budgets(kind="sensitivity", weights=((1.0, 2.0), (3.0, 1.0), (1.0, 1.0), (2, 1))),
    ),
    "the prompt stays, by age": Policy(
        slots=20, interval=3, sinks=1, trigger="generation", positions="cache",
        budgets=Budgets(kind="pyramid", beta=3),
    ),
}  # fmt: skip
KIVI: dict[str, Any] = dict(tiers=(Tier(key_bits=2, value_bits=2),), interval=8)
GROUPS: dict[str, Any] = dict(group=8, along="tokens")
EXTRA |= {
    "recent window in 16 bits": Policy(
        slots=44, interval=6, sinks=3, recent_window=10, rule=Attention(), tiers=K4,
        quantizer=Quantizer(group=8, fp16_sinks=True, fp16_recent=True),
    ),
    "grouped along tokens": Policy(**KIVI, quantizer=Quantizer(**GROUPS)),
    "grouped along tokens, values in 16 bits": Policy(
        slots=42, interval=8, tiers=(Tier(key_bits=2),), quantizer=Quantizer(**GROUPS),
    ),
    "ladder beside a recent window in 16 bits": Policy(
        slots=45, interval=16, trigger="prompt+stream", recent_window=12,
        ladder=Ladder(span=0.25, overlap=0.3), tiers=K4,
        quantizer=Quantizer(group=8, fp16_recent=True),
    ),
    "grouped along tokens, recent window and sinks in 16 bits": Policy(
        **KIVI, slots=61, sinks=8, recent_window=16,
        quantizer=Quantizer(**GROUPS, fp16_recent=True, fp16_sinks=True),
    ),
    "grouped along tokens, re-indexed, Lloyd levels, rotated": Policy(
        **KIVI, slots=42, positions="cache",
        quantizer=Quantizer(**GROUPS, levels="lloyd", rotate=True),
    ),
}  # fmt: skip
UNEVEN = Budgets(
    kind="sensitivity",
    exponent=1.0,
    weights=((1.0, 2.0), (1.0, 1.0), (3.0, 1.0), (0.5, 1.5)),
)
MIXED = HeadTiers(
    others=((Tier(),), (Tier(share=0.5, key_bits=8, value_bits=8),
                        Tier(share=0.5, key_bits=2, value_bits=2))),
    of=((0, 1), (1, 1), (2, 0), (0, 0)),
)  # fmt: skip
BY_LAYER = HeadTiers(others=((Tier(key_bits=3, value_bits=8),), (Tier(),)), of=(0, 1, 2, 1))
HEADS: dict[str, Any] = dict(slots=44, interval=4, sinks=2, recent_window=6, budgets=UNEVEN)
EXTRA |= {
    "heads by age": Policy(**HEADS, positions="cache"),
    "heads by age, bits per layer": Policy(
        **HEADS, tiers=K4, head_tiers=BY_LAYER, quantizer=Quantizer(group=8, fp16_sinks=True),
    ),
    "heads with tiers of their own": Policy(
        **HEADS, rule=Attention(beta=1), tiers=K4, head_tiers=MIXED, quantizer=Quantizer(group=8),
    ),
    "heads in ladders": Policy(**HEADS, ladder=Ladder(span=0.5), positions="cache", tiers=K4,
        quantizer=Quantizer(group=8)),
    "heads along tokens": Policy(
        slots=44, interval=8, sinks=8, budgets=UNEVEN, head_tiers=BY_LAYER,
        tiers=(Tier(key_bits=2, value_bits=2),),
        quantizer=Quantizer(group=8, along="tokens", fp16_sinks=True),
    ),
    "bits per head, nothing evicted": Policy(
        interval=8, rule=Attention(), head_tiers=MIXED, quantizer=Quantizer(group=8),
    ),
    "heads that share their layer's slots": Policy(
        **{**HEADS, "budgets": Budgets(kind="adakv")}, rule=Attention(), tiers=K4,
        quantizer=Quantizer(group=8, fp16_sinks=True),
    ),
    "heads after a prompt": Policy(
        **{**HEADS, "slots": 90}, trigger="prompt+stream", rule=Attention(horizon=4),
    ),
}  # fmt: skip
EXTRA |= {
    "shared slots without a floor, by fading sums": Policy(
        slots=44, interval=4, recent_window=11, budgets=Budgets(kind="adakv", floor=0),
        rule=Attention(alpha=0.5, horizon=20, kind="decay"),
    ),
    "shared slots, a window over three intervals": Policy(
        slots=44, interval=6, sinks=1, recent_window=7, budgets=Budgets(kind="adakv"),
        rule=Attention(beta=1, horizon=18), tiers=(Tier(key_bits=4, value_bits=2),),
        quantizer=Quantizer(group=8, fp16_sinks=True),
    ),
    "shared slots by a rule that reads the projection": Policy(
        slots=44, interval=4, sinks=2, recent_window=6, budgets=Budgets(kind="adakv"),
        rule=Critical(),
    ),
    "shared slots after a prompt, at every token": Policy(
        slots=40, sinks=2, recent_window=5, budgets=Budgets(kind="adakv"),
        rule=Attention(alpha=1, beta=1), trigger="prompt+stream",
    ),
}  # fmt: skip
BLOCKS: dict[str, Any] = dict(slots=44, interval=6, recent_window=8, rule=Attention())
EXTRA |= {
    "fp8 by rank, re-indexed": Policy(
        **BLOCKS, sinks=2, tiers=(Tier(share=0.3), Tier(share=0.7, key_bits=8, value_bits=8)),
        quantizer=Quantizer(levels="e5m2", fp16_sinks=True), positions="cache",
    ),
    "q8_0, q5_0 and q4_0 by rank": Policy(
        **BLOCKS,
        tiers=(Tier(share=0.3, key_bits=8, value_bits=8), Tier(share=0.4, key_bits=8, value_bits=5),
               Tier(share=0.3, key_bits=5, value_bits=4)),
        quantizer=Quantizer(levels="ggml-0", group=32),
    ),
    "q5_1, recent window in 16 bits": Policy(
        **BLOCKS, tiers=(Tier(key_bits=5, value_bits=4),),
        quantizer=Quantizer(levels="ggml-1", group=32, fp16_recent=True),
    ),
    "ggml formats by layer": Policy(
        **HEADS, tiers=(Tier(key_bits=8, value_bits=5),),
        head_tiers=HeadTiers(
            others=((Tier(key_bits=5, value_bits=4),), (Tier(),)), of=(0, 1, 2, 1)
        ),
        quantizer=Quantizer(levels="ggml-0", group=32),
    ),
    "values rotated in blocks": Policy(
        **BLOCKS,
        tiers=(Tier(share=0.3, key_bits=8, value_bits=4),
               Tier(share=0.7, key_bits=4, value_bits=4)),
        quantizer=Quantizer(group=8, rotate=True, value_block=4),
    ),
}  # fmt: skip
OFFSET = offset(ModelShape(4, 2, 16, 6))
EXTRA |= {
    "keys without an offset, by their directions": Policy(
        slots=44, interval=6, sinks=2, recent_window=8, rule=KeyDiff(), tiers=K4,
        quantizer=Quantizer(group=8, fp16_sinks=True, offset=OFFSET),
    ),
    "keys without an offset in some heads": Policy(
        **HEADS, rule=Attention(beta=1), tiers=K4, head_tiers=MIXED,
        quantizer=Quantizer(group=8, offset=OFFSET.model_copy(update={"scales": ()})),
    ),
    "some channels of keys without an offset": Policy(
        slots=44, interval=6, tiers=K4, quantizer=Quantizer(group=4, offset=OFFSET),
        channels=Channels(qk=("all", "0f 3c", "none", "all"), vo=("all", "all", "none", "all")),
    ),
}  # fmt: skip


FITTED: dict[str, Any] = dict(trigger="prompt", rule=Reread(), refit="values")
EXTRA |= {
    "fitted values and biases in three tiers": Policy(
        **(FITTED | {"refit": "values+bias"}), slots=50, recent_window=3, sinks=2,
        tiers=(Tier(share=0.2), Tier(share=0.4, key_bits=8, value_bits=4),
               Tier(share=0.4, key_bits=3, value_bits=2)),
        quantizer=Quantizer(group=16, rotate=True, levels="lloyd", fp16_sinks=True),
    ),
    "fitted values in uneven heads, a second reading in chunks": Policy(
        **(FITTED | {"rule": Reread(chunk=40)}), **HEADS, tiers=(Tier(key_bits=3, value_bits=5),),
        head_tiers=BY_LAYER, quantizer=Quantizer(group=8, rotate=True, offset=OFFSET),
    ),
    "fitted values and biases by one threshold": Policy(
        **(FITTED | {"refit": "values+bias"}), slots=40, sinks=2, tiers=K4,
        quantizer=Quantizer(group=8), budgets=Budgets(kind="adakv", floor=0, across="model"),
    ),
    "fitted values in a ladder, of some channels": Policy(
        **FITTED, slots=44, sinks=2, recent_window=8, ladder=Ladder(span=0.5), tiers=K4,
        quantizer=Quantizer(group=4),
        channels=Channels(qk=("all", "0f 3c", "none", "all"), vo=("all", "all", "none", "all")),
    ),
}  # fmt: skip


def of_rule(name: str, rule: Callable[..., Rule]) -> dict[str, Policy]:
    """Policies that a rule is proven by."""
    when: dict[str, Any] = {"trigger": "prompt"} if "rereading" in rule().needs else {}
    return {
        f"{name} every token": Policy(**when, slots=40, sinks=2, recent_window=4, rule=rule()),
        f"{name} in three tiers": Policy(
            **when, slots=60, interval=8, sinks=2, recent_window=6, rule=rule(),
            tiers=(Tier(share=0.3), *(Tier(share=0.35, key_bits=b, value_bits=4) for b in (8, 4))),
            quantizer=Quantizer(group=8, fp16_sinks=True),
        ),
        f"{name} voting together": Policy(
            **when, slots=50, interval=6, recent_window=4, rule=rule(share="layer"),
            tiers=(Tier(share=0.4), Tier(share=0.6, key_bits=4, value_bits=4)),
            quantizer=Quantizer(group=8),
        ),
        f"{name} in uneven heads": Policy(
            **when, **HEADS, rule=rule(), tiers=K4, quantizer=Quantizer(group=8),
        ),
        f"{name} in a ladder, re-indexed": Policy(
            **when, slots=44, interval=6, sinks=2, recent_window=8, rule=rule(),
            ladder=Ladder(span=0.5), tiers=K4, quantizer=Quantizer(group=8), positions="cache",
        ),
    }  # fmt: skip


LEARNED = [n for n, r in RULES.items() if "hidden" in r.needs]  # for one model: test_kvzap.py
for rule_name, rule in RULES.items():  # a new rule is proven by being listed
    EXTRA |= {} if rule_name in LEARNED else of_rule(rule_name, rule)
NAMED = [  # of anchors see test_anchors.py
    *(
        n
        for n, m in METHODS.items()
        if "anchors" not in m.knobs and m.knobs.get("rule") not in LEARNED
    ),
    *EXTRA,
]


def long_enough(sizes: Layout) -> int:
    """Tokens of `IDS` that end in full heads, compacted several times, and in pools that grew."""
    policy = sizes.policy
    if policy.trigger != "stream":
        return T
    full = sizes.horizon() or policy.recent_window + 4 * policy.interval
    return min(T, max(80, full + 12))


def head_dim(name: str) -> int:
    """Of a model that can run the policy."""
    extra = EXTRA.get(name)
    levels = METHODS[name].knobs.get("levels") if extra is None else extra.quantizer.levels
    return CODEBOOKS[str(levels or "uniform")].group or 16


def policy_of(name: str) -> Policy:
    if name in EXTRA:
        return EXTRA[name]
    knobs = METHODS[name].knobs
    setting = AFTER if knobs.get("trigger") == "prompt" else SETTING
    setting = replace(setting, shape=replace(setting.shape, head_dim=head_dim(name)))
    room = 4 * 6 * 16 * 17 // 2 if name == "expected-attention" else 0  # a layer's covariance
    policy = at(name, replace(setting, budget_bytes=(setting.budget_bytes or 0) + 4 * room))
    if isinstance(policy.rule, Reread):  # the tiny model has no tokenizer
        return policy.model_copy(update={"rule": Reread()})
    return policy
