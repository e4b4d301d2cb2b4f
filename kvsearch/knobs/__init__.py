"""The vocabulary of the search, and how its words become a policy of a given size."""

from kvsearch.knobs.fields import Setting
from kvsearch.knobs.heads import needs_heads
from kvsearch.knobs.presets import LADDERS, RULES, TIERS
from kvsearch.knobs.refine import BASES, effective, has_field, respelled
from kvsearch.knobs.sizing import build, sized
from kvsearch.knobs.vocabulary import KNOBS, Knob, Value, check_value

__all__ = [
    "BASES",
    "KNOBS",
    "LADDERS",
    "RULES",
    "TIERS",
    "Knob",
    "Setting",
    "Value",
    "build",
    "check_value",
    "effective",
    "has_field",
    "needs_heads",
    "respelled",
    "sized",
]
