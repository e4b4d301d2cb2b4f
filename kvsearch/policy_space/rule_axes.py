"""The search axes of rules, as knobs: what each field admits is read off the rule's own class."""

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from kvsearch.rules import RULES

NONE = "none"  # how a knob spells a field that is None


@dataclass(frozen=True)
class RuleAxis:
    """What the rules that have a field of some name admit between them.

    Attributes:
        rules: their names.
        names: admitted words.
        number: `int`, `float` or `bool` if such values are admitted.
        bounds: smallest and largest number admitted.
    """

    rules: tuple[str, ...]
    names: tuple[str, ...]
    number: type | None
    bounds: tuple[float, float]


def rule_axes() -> dict[str, RuleAxis]:
    """Field -> what it admits, over all rules of the table."""
    found: dict[str, RuleAxis] = {}
    for name, rule in RULES.items():
        for field in rule.axes:
            new = _read(name, rule.model_fields[field])
            found[field] = _both(found[field], new) if field in found else new
    return found


def _read(rule: str, field: FieldInfo) -> RuleAxis:
    names: list[str] = []
    number = None
    for kind in _alternatives(field.annotation):
        if get_origin(kind) is Literal:
            names += get_args(kind)
        elif kind is NoneType:
            names.append(NONE)
        else:
            number = kind
    low = [getattr(m, x) for m in field.metadata for x in ("ge", "gt") if hasattr(m, x)]
    high = [getattr(m, x) for m in field.metadata for x in ("le", "lt") if hasattr(m, x)]
    bounds = max(low, default=float("-inf")), min(high, default=float("inf"))
    return RuleAxis((rule,), tuple(names), number, bounds)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def _both(a: RuleAxis, b: RuleAxis) -> RuleAxis:
    """What either admits; which of the two a value goes with is checked when a policy is built."""
    return RuleAxis(
        (*a.rules, *b.rules),
        tuple(dict.fromkeys((*a.names, *b.names))),
        float if float in (a.number, b.number) else a.number or b.number,
        (min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1])),
    )
