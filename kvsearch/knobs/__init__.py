"""The vocabulary of the search, and how its words become a policy of a given size."""

from kvsearch.knobs.fields import Setting
from kvsearch.knobs.heads import needs_heads
from kvsearch.knobs.presets import LADDERS, RULES, TIERS
from kvsearch.knobs.refine import BASES, effective, has_field, respelled
from kvsearch.knobs.sizing import build, sized
from kvsearch.knobs.vocabulary import KNOBS, OLD_NAMES, Knob, Value, check_value, modern

__all__ = [
    "BASES",
    "KNOBS",
    "LADDERS",
    "OLD_NAMES",
    "RULES",
    "TIERS",
    "Knob",
    "Setting",
    "Value",
    "build",
    "check_value",
    "effective",
    "has_field",
    "modern",
    "needs_heads",
    "respelled",
    "sized",
]
