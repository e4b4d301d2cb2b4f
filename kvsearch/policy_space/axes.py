"""The vocabulary of the search: names of knobs, their defaults and the values they admit.

A search space and a published method are both dictionaries over these knobs, so every method is a
point of the space. Slots are not a knob: a policy gets as many as its share of the byte budget pays
for, once bits, scales, scores and headroom are counted.

A dotted knob refines the preset that the knob before the dot names, by the path of the policy's
field: `rule: xmu` with `rule.horizon: 256` is XMU's score over 256 rows.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any, get_args

from kvsearch.errors import nearest, quoted
from kvsearch.frozen import MOST
from kvsearch.policy.ladder import Order
from kvsearch.policy.parts import Bits
from kvsearch.policy_space.presets import LADDERS, RULES, TIERS
from kvsearch.policy_space.rule_axes import rule_axes
from kvsearch_kernels.codebooks import CODEBOOKS

Value = str | int | float | bool

BITS: tuple[int, ...] = get_args(Bits)


@dataclass(frozen=True)
class Knob:
    """One knob: its default and the values it admits.

    Attributes:
        default: value when a space or method does not name the knob; None, of dotted knobs, is
            what the preset says.
        names: admitted words; numbers are admitted when `number` is set.
        number: `int`, `float` or `bool` if such values are admitted.
        about: one line for people.
        low, high: smallest and largest number admitted.
        only: the numbers admitted, where not all between those are.
    """

    default: Value | None = None
    names: tuple[str, ...] = ()
    number: type | None = None
    about: str = ""
    low: float = 0.0
    high: float = float("inf")
    only: tuple[int, ...] = ()


def _bits(about: str) -> Knob:
    return Knob(None, (), int, about, min(BITS), max(BITS), BITS)


KNOBS: dict[str, Knob] = {
    "budget_fraction": Knob(1.0, (), float, "share of the byte budget to use", 0.0, 1.0),
    "evict": Knob(True, (), bool, "false keeps every token"),
    "interval": Knob(1, (), int, "tokens between compactions", 1),
    "trigger": Knob(
        "stream", ("stream", "prompt", "prompt+stream", "generation"), None, "when to compact"
    ),
    "sinks": Knob(0, (), int, "first tokens, never evicted"),
    "recent_window": Knob(
        0, ("half", "layers", "share"), int, "newest tokens, never evicted; share is of the slots"
    ),
    "recent_window.share": Knob(None, (), float, "share of the slots", 0.0, 0.95),
    "rule": Knob("none", tuple(RULES), None, "how slots are ranked; none goes by age"),
    **{
        f"rule.{field}": Knob(None, a.names, a.number, f"field of {', '.join(a.rules)}", *a.bounds)
        for field, a in rule_axes().items()
    },
    "ladder": Knob("none", tuple(LADDERS), None, "depth-staggered eviction"),
    "ladder.span": Knob(None, (), float, "share of the layers that keep an old token", 0.01, 0.99),
    "ladder.overlap": Knob(None, (), float, "share common to neighbouring rungs", 0.0, 0.99),
    "ladder.order": Knob(None, get_args(Order), None, "of LaCache's code or of its text"),
    "tiers": Knob("16", tuple(TIERS), None, "bits of keys and values"),
    "tiers.count": Knob(None, (), int, "number of tiers", 1, 3),
    "tiers.share": Knob(None, (), float, "of the first tier, if there are more", 0.0, 1.0),
    "tiers.share2": Knob(None, (), float, "of the second, of what the first leaves", 0.0, 1.0),
    "tiers.key_bits": _bits("of the first tier"),
    "tiers.value_bits": _bits("of the first tier"),
    "tiers.key_bits2": _bits("of the second tier, at most those of the first"),
    "tiers.value_bits2": _bits("of the second tier, at most those of the first"),
    "tiers.key_bits3": _bits("of the third tier, at most those of the second"),
    "tiers.value_bits3": _bits("of the third tier, at most those of the second"),
    "group": Knob(64, ("head",), int, "channels per scale", 1),
    "rotate": Knob(False, (), bool, "Hadamard rotation before quantising"),
    "value_block": Knob("head", ("head",), int, "most channels of a value that rotate together", 1),
    "levels": Knob("uniform", tuple(CODEBOOKS), None, "what codes stand for"),
    "value_levels": Knob("same", ("same", *CODEBOOKS), None, "what codes of values stand for"),
    "bits": Knob("alike", ("alike", "layer", "head"), None, "by measured loss, at the same mean"),
    "along": Knob("channels", ("channels", "tokens"), None, "what keys share a scale along"),
    "offset": Knob(
        "none", ("none", "keys", "scaled"), None, "keys without what they share; with scales"
    ),
    "refit": Knob(
        "none", ("none", "values", "values+bias"), None, "fit what a prompt leaves to all of it"
    ),
    "fp16_sinks": Knob(False, (), bool, "keep sinks in 16 bits"),
    "fp16_recent": Knob(False, (), bool, "keep the recent window in 16 bits"),
    "budgets": Knob(
        "uniform",
        (
            "uniform",
            "pyramid",
            "sensitivity",
            "heads",
            "marginal",
            "full-heads",
            "adakv",
            "global",
        ),
        None,
        "how layers, or KV heads, share the slots",
    ),
    "exponent": Knob(0.5, (), float, "of the measured sensitivity", 0.0, 2.0),
    "beta": Knob(20.0, (), float, "steepness of the pyramid", 1.0),
    "channels": Knob(
        "none",
        ("none", "uniform", "eq1", "01", "01-even"),
        None,
        "how removed channels are spread over the layers",
    ),
    "channels.ratio": Knob(None, (), float, "share of channels removed", 0.0, 1.0),
    "channels.qk": Knob(
        None, ("coupled",), float, "share of query and key pairs, ranked apart", 0.0, 1.0
    ),
    "channels.temperature": Knob(
        None, (), float, "of eq1: lower spares sensitive layers more", 0.01, 100.0
    ),
    "channels.score": Knob(None, ("l1", "l2", "taylor"), None, "which channels matter"),
    "anchors": Knob("none", ("none", "ep", "ac"), None, "tokens that stand for their sequence"),
    "anchors.marks": Knob(".", (".", ".?!", ".?!;", ".?!;:,"), None, "signs that endpoints end in"),
    "anchors.every": Knob(0, (), int, "tokens between anchors; 0 goes by marks or sentences"),
    "anchors.embedding": Knob("copy", ("copy", "mean"), None, "of a new token"),
    "anchors.close": Knob(True, (), bool, "anchors drop the rest of their sequence"),
    "anchors.isolate": Knob(True, (), bool, "anchors are blind to earlier anchors"),
    "positions": Knob("original", ("original", "cache"), None, "rotary index of keys"),
}


def check_value(knob: str, value: Any) -> str | None:
    """Why `value` is not admitted for `knob`, or None."""
    if knob not in KNOBS:
        return f"unknown knob {quoted(knob)}{nearest(knob, KNOBS)}"
    known = KNOBS[knob]
    if known.number is bool:
        return None if isinstance(value, bool) else f"{quoted(value)} is not true or false"
    if isinstance(value, str):
        if value in known.names:
            return None
        hint = nearest(value, known.names) if known.names else ": a number is needed"
        return f"unknown value {quoted(value)}{hint}"
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    if known.number is None or not fits:
        wanted = f"one of {', '.join(known.names)}" if known.names else "a number"
        return f"{quoted(value)} is not {wanted}"
    if isinstance(value, int) and abs(value) > MOST:
        return "whole numbers go to 2^60"
    if not isfinite(value) or (known.number is int and value != int(value)):
        return f"{quoted(value)} is not a {'whole' if known.number is int else 'finite'} number"
    if not known.low <= value <= known.high:
        limit = f"at least {known.low:g}" if value < known.low else f"at most {known.high:g}"
        return f"{quoted(value)} must be {limit}"
    if known.only and value not in known.only:
        return f"{quoted(value)} is not one of {', '.join(map(str, known.only))}"
    return None
