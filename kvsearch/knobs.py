"""The vocabulary of the search: named knobs that turn into a policy of a given size.

A search space and a published method are both dictionaries over these knobs, so every method is a
point of the space. Slots are not a knob: a policy gets as many as its share of the byte budget pays
for, once bits, scales, scores and headroom are counted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError, nearest
from kvsearch.policy import Budgets, Ladder, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.policy.cost import costs
from kvsearch.policy.layout import least_slots, peak_of
from kvsearch.rules import Rule, presets
from kvsearch_kernels.codebooks import CODEBOOKS

Value = str | int | float | bool

MANY = 1 << 12  # slots over which the bytes of one are averaged
STEPS = 8  # guesses at the slots that a budget pays for, before halving takes over

RULES: dict[str, Rule | None] = presets()

# Names of knobs in earlier records and spaces.
OLD_NAMES = {
    "fill": "budget_fraction",
    "score": "rule",
    "recents": "recent_window",
    "spread": "budgets",
    "layer_budgets": "budgets",
}

LADDERS: dict[str, Ladder | None] = {
    "none": None,
    "quarter": Ladder(span=0.25, overlap=0.5),
    "quarter-contiguous": Ladder(span=0.25, overlap=0.5, order="contiguous"),
    "half": Ladder(span=0.5, overlap=0.0),
    "half-overlap": Ladder(span=0.5, overlap=0.5),
}


def _tiers(*parts: tuple[float, int, int]) -> tuple[Tier, ...]:
    return tuple(Tier.model_validate(dict(share=s, key_bits=k, value_bits=v)) for s, k, v in parts)


TIERS: dict[str, tuple[Tier, ...]] = {
    "16": _tiers((1, 16, 16)),
    "k8v8": _tiers((1, 8, 8)),
    "k8v4": _tiers((1, 8, 4)),
    "k4v4": _tiers((1, 4, 4)),
    "k4v3": _tiers((1, 4, 3)),
    "k4v2": _tiers((1, 4, 2)),
    "k3v3": _tiers((1, 3, 3)),
    "k2v2": _tiers((1, 2, 2)),
    "k1v1": _tiers((1, 1, 1)),
    "8-4": _tiers((0.3, 8, 8), (0.7, 4, 4)),
    "4-v2": _tiers((0.5, 4, 4), (0.5, 4, 2)),
    "16-4": _tiers((0.1, 16, 16), (0.9, 4, 4)),
    # XMU's Table 1, by the ratio it prints; its 0.6 adds up to 0.45, 0.6-fixed is what it means
    "xmu-0.1": _tiers((0.2, 4, 4), (0.8, 1, 1)),
    "xmu-0.2": _tiers((0.6, 4, 4), (0.4, 2, 2)),
    "xmu-0.4": _tiers((0.6, 8, 8), (0.4, 4, 4)),
    "xmu-0.6-printed": _tiers((0.8, 8, 8), (0.2, 4, 4)),
    "xmu-0.6-fixed": _tiers((0.2, 16, 16), (0.8, 8, 8)),
    "xmu-0.8": _tiers((0.6, 16, 16), (0.4, 8, 8)),
}


@dataclass(frozen=True)
class Knob:
    """One knob: its default and the values it admits.

    Attributes:
        default: value when a space or method does not name the knob.
        names: admitted words; numbers are admitted when `number` is set.
        number: `int` or `float` if numbers are admitted.
        about: one line for people.
        low, high: smallest and largest number admitted.
    """

    default: Value
    names: tuple[str, ...] = ()
    number: type | None = None
    about: str = ""
    low: float = 0.0
    high: float = float("inf")


KNOBS: dict[str, Knob] = {
    "budget_fraction": Knob(1.0, (), float, "share of the byte budget to use", 0.0, 1.0),
    "evict": Knob(True, (), bool, "false keeps every token"),
    "interval": Knob(1, (), int, "tokens between compactions", 1),
    "trigger": Knob("stream", ("stream", "prompt", "prompt+stream"), None, "when to compact"),
    "sinks": Knob(0, (), int, "first tokens, never evicted"),
    "recent_window": Knob(0, ("half", "layers"), int, "newest tokens, never evicted"),
    "rule": Knob("none", tuple(RULES), None, "how slots are ranked; none goes by age"),
    "ladder": Knob("none", tuple(LADDERS), None, "depth-staggered eviction"),
    "tiers": Knob("16", tuple(TIERS), None, "bits of keys and values"),
    "group": Knob(64, ("head",), int, "channels per scale", 1),
    "rotate": Knob(False, (), bool, "Hadamard rotation before quantising"),
    "levels": Knob("uniform", tuple(CODEBOOKS), None, "what codes stand for"),
    "along": Knob("channels", ("channels", "tokens"), None, "what keys share a scale along"),
    "fp16_sinks": Knob(False, (), bool, "keep sinks in 16 bits"),
    "fp16_recent": Knob(False, (), bool, "keep the recent window in 16 bits"),
    "budgets": Knob("uniform", ("uniform", "pyramid", "sensitivity"), None, "slots per layer"),
    "exponent": Knob(0.5, (), float, "of the measured sensitivity", 0.0, 2.0),
    "beta": Knob(20.0, (), float, "steepness of the pyramid", 1.0),
    "positions": Knob("original", ("original", "cache"), None, "rotary index of keys"),
}


@dataclass(frozen=True)
class Setting:
    """What a policy is sized for.

    Attributes:
        shape: the model's.
        budget_bytes: per sequence, that the peak may reach, or None for no limit.
        tokens: length of the stream; policies that keep every token grow with it.
        sensitivity: measured sensitivity per layer, or empty if it was not measured.
        prompt: tokens of the stream that one forward call brings in at its start.
    """

    shape: ModelShape
    budget_bytes: int | None
    tokens: int
    sensitivity: tuple[float, ...] = ()
    prompt: int = 0


def check_value(knob: str, value: Any) -> str | None:
    """Why `value` is not admitted for `knob`, or None."""
    if knob not in KNOBS:
        return f"unknown knob {knob!r}{nearest(knob, KNOBS)}"
    known = KNOBS[knob]
    if known.number is bool:
        return None if isinstance(value, bool) else f"{value!r} is not true or false"
    if isinstance(value, str):
        return (
            None
            if value in known.names
            else f"unknown value {value!r}{nearest(value, known.names)}"
        )
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if known.number is None or not fits:
        return f"{value!r} is not one of {', '.join(known.names)}"
    if known.number is int and value != int(value):
        return f"{value!r} is not a whole number"
    if not known.low <= value <= known.high:
        limit = f"at least {known.low:g}" if value < known.low else f"at most {known.high:g}"
        return f"{value!r} must be {limit}"
    return None


def build(knobs: Mapping[str, Value], setting: Setting, name: str | None = None) -> Policy:
    """The policy that `knobs` describe, with as many slots as the budget pays for.

    Raises:
        PolicyError: an unknown knob or value, or a budget too small for what is never evicted.
    """
    return sized(knobs, setting, name)[0]


def sized(
    knobs: Mapping[str, Value], setting: Setting, name: str | None = None
) -> tuple[Policy, int]:
    """What `build` makes, and its peak in bytes, which finding its slots has already told."""
    for knob, value in knobs.items():
        if reason := check_value(knob, value):
            raise PolicyError(f"knob {knob}: {reason}")
    get = {k: knobs.get(k, v.default) for k, v in KNOBS.items()}
    if not get["evict"]:
        policy = _policy(get, setting, None, name)
        return policy, layout(policy, setting.shape).bytes_peak(setting.tokens, setting.prompt)
    if setting.budget_bytes is None:
        raise PolicyError("a budget is needed to size this policy")
    return _largest(get, setting, int(setting.budget_bytes * float(get["budget_fraction"])), name)


def _largest(
    get: dict[str, Value], setting: Setting, limit: int, name: str | None
) -> tuple[Policy, int]:
    """The policy with the most slots whose peak is at most `limit` bytes, and that peak.

    The policy is validated once: only slots, and a recent window of half of them, differ between
    the sizes tried.
    """
    base = _policy(get, setting, 2, name)
    priced = costs(base, base.channels.on(setting.shape))
    least = 1  # the recent window may grow with the slots, and the least slots with those
    while (need := least_slots(base, setting.shape, _recent_window(get, setting, least))) > least:
        least = need
    low, high = least - 1, 1 << (4 * setting.tokens - 1).bit_length()
    residual = base.interval if base.compacts else 0
    many, twice = (
        sum(count * cost.bytes(n, residual, None) for cost, count in Counter(priced).items())
        for n in (MANY, 2 * MANY)
    )
    slope = (twice - many) / MANY
    guess = MANY + residual + (limit - many) / slope
    turn = peak = 0
    while low + 1 < high:
        mid = min(max(int(guess), low + 1), high - 1) if turn < STEPS else (low + high) // 2
        recent_window = _recent_window(get, setting, mid)
        held = peak_of(
            base, setting.shape, priced, mid, recent_window, setting.tokens, setting.prompt
        )
        low, high, peak = (low, mid, peak) if held > limit else (mid, high, held)
        step = (limit - held) / slope  # nearly linear; at least one slot on, which quantises it
        guess = mid + (max(1.0, step) if step >= 0 else min(-1.0, step))
        turn += 1
    recent_window = _recent_window(get, setting, low)
    policy = base.model_copy(update={"slots": low, "recent_window": recent_window})
    if low >= least:
        return policy, peak
    reason = f"{limit} bytes pay for no slot"
    try:
        layout(policy, setting.shape)
    except PolicyError as e:
        reason = str(e)
    raise PolicyError(f"budget too small: {reason}")


def _recent_window(get: Mapping[str, Value], setting: Setting, slots: int | None) -> int:
    recent_window = get["recent_window"]
    if recent_window == "half":
        return (slots or 0) // 2
    return setting.shape.layers if recent_window == "layers" else int(recent_window)


def _policy(get: dict[str, Value], setting: Setting, slots: int | None, name: str | None) -> Policy:
    shape = setting.shape
    group = shape.head_dim if get["group"] == "head" else int(get["group"])
    while shape.head_dim % group:
        group -= 1
    kind = get["budgets"]
    if kind == "sensitivity" and not setting.sensitivity:
        raise PolicyError("budgets 'sensitivity' needs the model's sensitivity to be measured")
    weights = setting.sensitivity if kind == "sensitivity" else ()
    of = "rest" if kind == "pyramid" else "total"
    fields: dict[str, Any] = dict(
        name=name,
        slots=slots,
        interval=int(get["interval"]),
        trigger=get["trigger"],
        sinks=int(get["sinks"]),
        recent_window=_recent_window(get, setting, slots),
        budgets=_part(
            Budgets,
            kind=kind,
            beta=get["beta"],
            of=of,
            exponent=get["exponent"],
            weights=weights,
        ),
        ladder=LADDERS[str(get["ladder"])] if slots is not None else None,
        rule=_rule(str(get["rule"]), int(get["interval"])),
        tiers=TIERS[str(get["tiers"])],
        quantizer=_part(
            Quantizer,
            group=group,
            rotate=get["rotate"],
            levels=get["levels"],
            along=get["along"],
            fp16_sinks=get["fp16_sinks"],
            fp16_recent=get["fp16_recent"],
        ),
        positions=get["positions"],
    )
    return Policy.build(fields, where=name or "policy")


@lru_cache(maxsize=1024, typed=True)
def _part(what: type[Budgets] | type[Quantizer], **fields: Any) -> Budgets | Quantizer:
    """A part of a policy; validated once, since a search asks for the same few again and again."""
    return what.model_validate(fields)


@lru_cache(maxsize=1024)
def _rule(name: str, interval: int) -> Rule | None:
    rule = RULES[name]
    return None if rule is None else rule.fitted(interval)


def modern(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """`knobs` of a record or space of the first version, by today's names."""
    return {OLD_NAMES.get(name, name): value for name, value in knobs.items()}
