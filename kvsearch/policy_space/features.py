"""A policy as numbers between about 0 and 1, chosen so that near means alike.

Knobs alone would hide what decides the loss: how many slots the bytes paid for, how much of them
the newest tokens take, how long they stay uncompressed. So features are read off the built policy,
and scaled by fixed constants, never by the data: the same policy has the same features for ever.
The constants make the usual range of each about as long as the step of a flag, because the model
takes what is near for alike before it has seen a difference.
"""

from functools import lru_cache
from math import log2
from statistics import pstdev

from kvsearch.policy import Budgets, Channels, ModelShape, Policy, Tier
from kvsearch.policy.pruning import Importance
from kvsearch.policy_space.presets import RULES
from kvsearch.policy_space.space import SearchSpace
from kvsearch.policy_space.to_policy import Setting
from kvsearch.rules import feature_names
from kvsearch_kernels.codebooks import CODEBOOKS

# Features that count only where a space has the axis, and some of these words on it: the presets do
# not differ in them, or the first studies did not have them.
BY_KNOB: dict[str, tuple[str, ...]] = {
    "fp16 recent": ("fp16_recent",),
    "along tokens": ("along",),
    "offset": ("offset",),
    "refit": ("refit",),
    "value block": ("value_block",),
    "value levels": ("value_levels",),
    "contiguous": ("ladder.order",),
    "tiers": ("tiers.count",),
    "first share": ("tiers.share",),
    "second share": ("tiers.share2",),
    "first key bits": ("tiers.key_bits2",),
    "first value bits": ("tiers.value_bits2",),
    "low value bits": ("tiers.value_bits2",),
    "per head": ("budgets", "heads", "marginal", "full-heads", "adakv", "global"),
    "uneven": ("budgets", "heads", "marginal", "full-heads"),
    "adaptive": ("budgets", "adakv", "global"),
    "across layers": ("budgets", "global"),
    "bits by loss": ("bits",),
    "bits by head": ("bits", "head"),
    "removed keys": ("channels",),
    "removed values": ("channels",),
    "removed layers": ("channels",),
    "removed by l1": ("channels.score",),
    "removed by taylor": ("channels.score",),
    "anchors": ("anchors",),
    "new anchors": ("anchors", "ac"),
    "mean embedding": ("anchors.embedding",),
    "anchor marks": ("anchors.marks",),
    "anchor distance": ("anchors.every",),
    "anchors seen": ("anchors.isolate",),
    "anchors close nothing": ("anchors.close",),
}


def names_for(space: SearchSpace) -> tuple[str, ...]:
    """Features in which policies of a space can differ.

    The lengths that the process expects grow with the number of features, so those of rules and
    formats that the space does not hold are left out.
    """
    rule, levels = space.axes.get("rule"), space.axes.get("levels")
    held = [RULES[str(name)] for name in (rule.choice if rule and rule.choice else ())]
    absent = set(feature_names())
    for r in held:
        if r is not None:
            absent -= set(r.feature_names)
            absent -= {shown for field, shown in r.axes.items() if f"rule.{field}" in space.axes}
    absent |= set(CODEBOOKS) - set(levels.choice if levels and levels.choice else ())
    absent |= {name for name, (knob, *words) in BY_KNOB.items() if not _on(space, knob, words)}
    return tuple(name for name in every_name() if name not in absent)


def _on(space: SearchSpace, knob: str, words: list[str]) -> bool:
    axis = space.axes.get(knob)
    return axis is not None and (not words or not {*words}.isdisjoint(axis.choice or ()))


def every_name() -> tuple[str, ...]:
    """Names of all features: those of every rule and codebook that is listed now."""
    return (
        *_slots(Policy(), 1.0, 2),
        *_tiers(Policy().tiers),
        *_stored(Policy(), 1),
        *_rule(Policy()),
        *_layers(Policy()),
        *_anchors(Policy()),
        *_removed(Policy(), ModelShape(1, 1, 1, 1), None),
    )


def features(
    policy: Policy, setting: Setting, names: tuple[str, ...] | None = None
) -> tuple[float, ...]:
    """The numbers of the features `names`; inactive ones are 0.

    Each is clipped to [0, 1], but for those of rules, which scale their own, and of tiers, where
    one bit is below 0.

    Args:
        policy: built for `setting`.
        setting: whose budget and length give the units.
        names: some of `every_name`, in any order; None is all of them.
    """
    tokens = max(2, setting.tokens)
    budget = setting.budget_bytes or setting.shape.budget_bytes(tokens)
    fp16_slots = max(1.0, budget / setting.shape.budget_bytes(1))
    numbers = (
        _slots(policy, fp16_slots, tokens)
        | _stored(policy, setting.shape.head_dim)
        | _layers(policy)
        | _anchors(policy)
        | _removed(policy, setting.shape, setting.importance)
    )
    found = {name: min(1.0, max(0.0, x)) for name, x in numbers.items()}
    found |= _tiers(policy.tiers) | _rule(policy)
    return tuple(float(found[name]) for name in names or every_name())


def _slots(p: Policy, fp16_slots: float, tokens: int) -> dict[str, float]:
    slots = min(p.slots or tokens, tokens)
    return {
        "slots": (log2(slots / fp16_slots) + 2) / 4,  # over the budget in fp16 slots
        "kept": 1 + log2(slots / tokens) / 7,  # log share of the stream that fits in the slots
        "sinks": log2(1 + p.sinks) / 4,
        "recent_window": log2(1 + p.recent_window) / log2(1 + slots),  # log share of the slots
        "interval": log2(p.interval) / 6,
        "interval share": 2 * p.interval / slots,  # the part that is never compressed or chosen
        "positions": p.positions == "cache",
        "refit": {"none": 0, "values": 0.75, "values+bias": 1}[p.refit],
        "prompt": {"stream": 0, "generation": 0.25, "prompt+stream": 0.5, "prompt": 1}[p.trigger],
    }


def _tiers(tiers: tuple[Tier, ...]) -> dict[str, float]:
    first, last = tiers[0], tiers[-1]
    left = 1 - first.share
    return {
        "key bits": _bits(sum(t.share * t.key_bits for t in tiers)),  # mean over tiers
        "value bits": _bits(sum(t.share * t.value_bits for t in tiers)),
        "low key bits": _bits(last.key_bits),  # of the worst tier
        "low value bits": _bits(last.value_bits),
        "tiers": (len(tiers) - 1) / 2,
        "first share": first.share if left else 0,
        "second share": tiers[1].share / left if len(tiers) > 2 else 0,
        "first key bits": _bits(first.key_bits),
        "first value bits": _bits(first.value_bits),
    }


def _bits(bits: float) -> float:
    return (log2(bits) - 1) / 3


def _stored(p: Policy, head_dim: int) -> dict[str, float]:
    q, quantizes = p.quantizer, p.quantizes
    group = (q.group or head_dim) if quantizes and q.scaled else 0
    values = [*CODEBOOKS].index(q.value_levels or q.levels) + 1
    return {
        "fp16 sinks": p.fp16_sinks > 0,
        "fp16 recent": p.fp16_recent > 0,
        "along tokens": quantizes and q.along == "tokens",
        "rotate": quantizes and q.rotate,
        "offset": 0 if p.offset is None else p.offset.vectors / 2,
        "value levels": values / len(CODEBOOKS)
        if quantizes and q.value_levels not in (None, q.levels)
        else 0,
        "value block": log2(128 / q.value_block) / 6
        if quantizes and q.rotate and q.value_block is not None
        else 0,
        **{name: quantizes and q.levels == name for name in CODEBOOKS if name != "uniform"},
        "group": (log2(group) - 3) / 4 if group else 0,
    }


def _rule(p: Policy) -> dict[str, float]:
    """The rules' own, each from its table."""
    rule = p.active_rule
    ranked = {} if rule is None else rule.features()
    return {"ranked": rule is not None, **{n: ranked.get(n, 0.0) for n in feature_names()}}


def _layers(p: Policy) -> dict[str, float]:
    ladder, budgets = p.ladder, p.budgets
    return {
        "ladder": ladder is not None,
        "span": ladder.span if ladder is not None else 0,
        "overlap": ladder.overlap if ladder is not None else 0,
        "contiguous": ladder is not None and ladder.order == "contiguous" and not p.scored,
        "pyramid": 1 - 1 / budgets.beta if budgets.kind == "pyramid" else 0,
        "sensitivity": budgets.kind == "sensitivity",
        "exponent": budgets.exponent if budgets.kind == "sensitivity" else 0,
        "per head": budgets.per_head,
        "uneven": _spread(budgets) if budgets.per_head else 0,
        "adaptive": budgets.kind == "adakv",
        "across layers": budgets.across == "model",
        "bits by loss": p.head_tiers is not None,
        "bits by head": p.head_tiers is not None and p.head_tiers.per_head,
    }


@lru_cache(maxsize=1024)
def _spread(budgets: Budgets) -> float:
    """Standard deviation of the log share of the heads, as a part of two octaves."""
    rows = (row if isinstance(row, tuple) else (row,) for row in budgets.weights)
    shares = [budgets.exponent * log2(w) for row in rows for w in row]
    return pstdev(shares) / 2 if shares else 0.0


def _removed(p: Policy, shape: ModelShape, measured: Importance | None) -> dict[str, float]:
    """Shares of all key channels, value channels and layers, and the score that chose them."""
    widths, most = p.channels.on(shape).per_layer, shape.layers * shape.head_dim
    return {
        "removed keys": 1 - sum(k for k, _ in widths) / most,
        "removed values": 1 - sum(v for _, v in widths) / most,
        "removed layers": widths.count((0, 0)) / shape.layers,
        "removed by l1": _agreement(p.channels, "l1", measured),
        "removed by taylor": _agreement(p.channels, "taylor", measured),
    }


@lru_cache(maxsize=1024)
def _agreement(channels: Channels, score: str, measured: Importance | None) -> float:
    """Share of the kept channels that are a score's best; 0 where no head keeps a part.

    Of value channels, or where all of those are kept, of the pairs of keys.
    """
    orders = measured.orders.get(score) if measured else None
    if orders is None:
        return 0.0
    for all_orders, kept_of in ((orders.vo, channels.values), (orders.qk, channels.pairs)):
        kept = best = 0
        for i, order in enumerate(all_orders):
            for mine, ranked in zip(kept_of(i) or (), order, strict=False):
                kept += len(mine)
                best += len({*mine}.intersection(ranked[: len(mine)]))
        if kept:
            return best / kept
    return 0.0


def _anchors(p: Policy) -> dict[str, float]:
    a = p.anchors
    return {
        "anchors": a is not None,
        "new anchors": a is not None and a.insert,
        "mean embedding": a is not None and a.insert and a.embedding == "mean",
        "anchor marks": (len(a.marks) - 1) / 5 if a is not None and a.at == "marks" else 0,
        "anchor distance": log2(a.at) / 8 if a is not None and isinstance(a.at, int) else 0,
        "anchors seen": a is not None and not a.isolate,
        "anchors close nothing": a is not None and not a.close,
    }
