"""A policy as numbers between 0 and 1, chosen so that near means alike.

Knobs alone would hide what decides the loss: how many slots the bytes paid for, how much of them
the newest tokens take, how long they stay uncompressed. So features are read off the built policy,
and scaled by fixed constants, never by the data: the same policy has the same features for ever.
The constants make the usual range of each about as long as the step of a flag, because the model
takes what is near for alike before it has seen a difference.
"""

from math import log2

from kvsearch.knobs import RULES, Setting
from kvsearch.policy import Policy
from kvsearch.rules import feature_names
from kvsearch.space import SearchSpace
from kvsearch_kernels.codebooks import CODEBOOKS

BY_KNOB = {  # newer than the first studies
    "fp16 recent": "fp16_recent",
    "along tokens": "along",
    "value block": "value_block",
    "removed keys": "channels",
    "removed values": "channels",
    "removed layers": "channels",
}


def every_name() -> tuple[str, ...]:
    """Names of all features: those of every rule and codebook that is listed now."""
    return (
        "slots",  # log2 of slots over the budget in fp16 slots
        "kept",  # log share of the stream that fits in the slots
        "key bits",  # log2 of the mean over tiers
        "value bits",
        "low key bits",  # log2 of the worst tier
        "sinks",
        "recent_window",  # log share of the slots
        "interval",
        "interval share",  # of the slots: the part that is never compressed or chosen
        "fp16 sinks",
        "fp16 recent",
        "along tokens",
        "rotate",
        "value block",  # a value is rotated in smaller blocks than a key
        *(name for name in CODEBOOKS if name != "uniform"),
        "group",
        "ranked",
        *feature_names(),  # of the rules, each from its own table
        "ladder",
        "span",
        "overlap",
        "pyramid",
        "sensitivity",
        "exponent",
        "removed keys",  # share of all their channels
        "removed values",
        "removed layers",  # share that has no attention
        "positions",
        "prompt",
    )


def names_for(space: SearchSpace) -> tuple[str, ...]:
    """Features in which policies of a space can differ.

    The lengths that the process expects grow with the number of features, so those of rules and
    formats that the space does not hold are left out.
    """
    rule, levels = space.axes.get("rule"), space.axes.get("levels")
    held = [RULES[str(name)] for name in (rule.choice if rule and rule.choice else ())]
    absent = set(feature_names()) - {n for r in held if r is not None for n in r.feature_names}
    absent |= set(CODEBOOKS) - set(levels.choice if levels and levels.choice else ())
    absent |= {name for name, knob in BY_KNOB.items() if knob not in space.axes}
    return tuple(name for name in every_name() if name not in absent)


def features(
    policy: Policy, setting: Setting, names: tuple[str, ...] | None = None
) -> tuple[float, ...]:
    """The numbers of the features `names`, each clipped to [0, 1]; inactive ones are 0.

    Args:
        policy: built for `setting`.
        setting: whose budget and length give the units.
        names: some of `every_name`, in any order; None is all of them.
    """
    p, q, rule, budgets = policy, policy.quantizer, policy.active_rule, policy.budgets
    tokens = max(2, setting.tokens)
    slots = min(p.slots or tokens, tokens)
    budget = setting.budget_bytes or setting.shape.budget_bytes(tokens)
    fp16_slots = max(1.0, budget / setting.shape.budget_bytes(1))
    keys = sum(t.share * t.key_bits for t in p.tiers)
    values = sum(t.share * t.value_bits for t in p.tiers)
    quantizes, ladder = p.quantizes, p.ladder
    scaled = quantizes and CODEBOOKS[q.levels].numbers > 0
    group = (q.group or setting.shape.head_dim) if scaled else 0
    ranked = {} if rule is None else rule.features()
    numbers = (
        (log2(slots / fp16_slots) + 2) / 4,
        1 + log2(slots / tokens) / 7,
        (log2(keys) - 1) / 3,
        (log2(values) - 1) / 3,
        (log2(p.tiers[-1].key_bits) - 1) / 3,
        log2(1 + p.sinks) / 4,
        log2(1 + p.recent_window) / log2(1 + slots),
        log2(p.interval) / 6,
        2 * p.interval / slots,
        p.fp16_sinks > 0,
        p.fp16_recent > 0,
        quantizes and q.along == "tokens",
        quantizes and q.rotate,
        quantizes and q.rotate and q.value_block is not None,
        *(quantizes and q.levels == name for name in CODEBOOKS if name != "uniform"),
        (log2(group) - 3) / 4 if group else 0,
        rule is not None,
        *(ranked.get(name, 0.0) for name in feature_names()),
        ladder is not None,
        ladder.span if ladder is not None else 0,
        ladder.overlap if ladder is not None else 0,
        1 - 1 / budgets.beta if budgets.kind == "pyramid" else 0,
        budgets.kind == "sensitivity",
        budgets.exponent if budgets.kind == "sensitivity" else 0,
        *_removed(policy, setting),
        p.positions == "cache",
        0 if p.trigger == "stream" else 0.5 if p.trigger == "prompt+stream" else 1,
    )
    named = dict(zip(every_name(), numbers, strict=True))
    return tuple(min(1.0, max(0.0, float(named[name]))) for name in names or every_name())


def _removed(policy: Policy, setting: Setting) -> tuple[float, float, float]:
    """Shares of key channels, value channels and whole layers that a policy removes."""
    if not policy.channels.active:
        return 0.0, 0.0, 0.0
    shape = setting.shape
    widths, most = policy.channels.on(shape).per_layer, shape.layers * shape.head_dim
    keys, values = (sum(each) for each in zip(*widths, strict=True))
    return 1 - keys / most, 1 - values / most, widths.count((0, 0)) / shape.layers
