"""The policy space: axes and their values, and how a point of it becomes a policy of a given size.

A point names a value of some axes and leaves the others at their defaults. Named methods, starting
points and proposals of a search are points; `sized` makes a policy of one, for a model and a
budget. Spaces are YAML files with a closed schema and no code.
"""

from kvsearch.policy_space.axes import KNOBS, Knob, Value, check_value
from kvsearch.policy_space.by_head import needs_heads
from kvsearch.policy_space.dotted import BASES, effective, has_field, respelled
from kvsearch.policy_space.presets import LADDERS, RULES, TIERS
from kvsearch.policy_space.sizing import build, sized
from kvsearch.policy_space.space import SearchSpace
from kvsearch.policy_space.space_axis import Axis, drawn, on_grid
from kvsearch.policy_space.space_files import load, names
from kvsearch.policy_space.to_policy import Setting

__all__ = [
    "BASES",
    "KNOBS",
    "LADDERS",
    "RULES",
    "TIERS",
    "Axis",
    "Knob",
    "SearchSpace",
    "Setting",
    "Value",
    "build",
    "check_value",
    "drawn",
    "effective",
    "has_field",
    "load",
    "names",
    "needs_heads",
    "on_grid",
    "respelled",
    "sized",
]
