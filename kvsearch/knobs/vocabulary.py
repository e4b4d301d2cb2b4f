"""The vocabulary of the search: names of knobs, their defaults and the values they admit.

A search space and a published method are both dictionaries over these knobs, so every method is a
point of the space. Slots are not a knob: a policy gets as many as its share of the byte budget pays
for, once bits, scales, scores and headroom are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsearch.errors import nearest
from kvsearch.knobs.presets import LADDERS, RULES, TIERS
from kvsearch_kernels.codebooks import CODEBOOKS

Value = str | int | float | bool

# Names of knobs in earlier records and spaces.
OLD_NAMES = {
    "fill": "budget_fraction",
    "score": "rule",
    "recents": "recent_window",
    "spread": "budgets",
    "layer_budgets": "budgets",
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
    "value_block": Knob("head", ("head",), int, "most channels of a value that rotate together", 2),
    "levels": Knob("uniform", tuple(CODEBOOKS), None, "what codes stand for"),
    "bits": Knob("alike", ("alike", "layer", "head"), None, "by measured loss, at the same mean"),
    "along": Knob("channels", ("channels", "tokens"), None, "what keys share a scale along"),
    "fp16_sinks": Knob(False, (), bool, "keep sinks in 16 bits"),
    "fp16_recent": Knob(False, (), bool, "keep the recent window in 16 bits"),
    "budgets": Knob(
        "uniform",
        ("uniform", "pyramid", "sensitivity", "heads", "marginal", "adakv"),
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
    "channels.ratio": Knob(0.2, (), float, "share of channels removed", 0.0, 1.0),
    "channels.qk": Knob(
        "coupled", ("coupled",), float, "share of query and key pairs, ranked apart", 0.0, 1.0
    ),
    "channels.score": Knob("l2", ("l1", "l2", "taylor"), None, "which channels matter"),
    "positions": Knob("original", ("original", "cache"), None, "rotary index of keys"),
}


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


def modern(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """`knobs` of a record or space of the first version, by today's names."""
    return {OLD_NAMES.get(name, name): value for name, value in knobs.items()}
