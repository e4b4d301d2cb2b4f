"""The fields of a policy as an export speaks of them, and the verdict on each."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvsearch.policy import (
    Anchors,
    Budgets,
    Channels,
    HeadTiers,
    Ladder,
    Offset,
    Policy,
    Quantizer,
    Tier,
)  # fmt: skip
from kvsearch.rules import Rule

MOST = 34  # characters of a value
Word = Literal["exact", "approximate", "dropped"]


# A policy does what the field says how to do: its default is one way of several, not "off".
_USED: dict[str, Callable[[Policy], bool]] = {
    "interval": lambda p: p.compacts,
    "trigger": lambda p: p.compacts,
    "quantizer.levels": lambda p: p.quantizes,
    "quantizer.group": lambda p: p.quantizes,
}
# Defaults of all fields that say what a policy does.
FIELDS: dict[str, Any] = {
    name: info.get_default(call_default_factory=True)
    for name, info in Policy.model_fields.items()
    if name not in ("schema_", "name", "about", "quantizer")
} | {f"quantizer.{name}": info.default for name, info in Quantizer.model_fields.items()}


@dataclass(frozen=True)
class Verdict:
    """What became of one field.

    Attributes:
        field: its path in the policy.
        asked, given: its values.
        verdict: `exact`; `approximate`; or `dropped`, back at its default.
    """

    field: str
    asked: Any
    given: Any
    verdict: Word


def value(policy: Policy, name: str) -> Any:
    """The value of a field."""
    head, _, tail = name.partition(".")
    found = getattr(policy, head)
    return getattr(found, tail) if tail else found


def with_value(policy: Policy, name: str, new: Any) -> Policy:
    """A copy with another value of a field, not validated."""
    head, _, tail = name.partition(".")
    if tail:
        new = getattr(policy, head).model_copy(update={tail: new})
    return policy.model_copy(update={head: new})


def active(policy: Policy, name: str, layers: int | None = None) -> bool:
    """Whether the field, at its default instead, would change what the policy does."""
    other = with_value(policy, name, FIELDS[name])
    return other.canonical(layers) != policy.canonical(layers)


def verdicts(asked: Policy, given: Policy, layers: int | None = None) -> list[Verdict]:
    """What becomes of every field that is not at its default, or not as it was asked.

    Args:
        asked: the policy.
        given: what a runtime runs for it.
        layers: of the model, if known; ladders are then compared by their integers.
    """
    out = []
    for name, default in FIELDS.items():
        a, g = value(asked, name), value(given, name)
        word: Word = "exact"
        if a != g:
            off = not _USED[name](given) if name in _USED else g == default
            word = "dropped" if off else "approximate"
        if a != default or word != "exact":
            out.append(Verdict(name, a, g, word))
    return out


def field_text(value: Any) -> str:
    """A field's value in a few words, for tables; long ones are cut."""
    text = _words(value)
    return text if len(text) <= MOST else text[: MOST - 3] + "..."


def _words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Rule | Ladder | Anchors):
        changed = value.model_dump(exclude_defaults=True, exclude={"name"})
        name = value.name if isinstance(value, Rule) else type(value).__name__.lower()
        return " ".join([name, *(f"{k}={v}" for k, v in changed.items())])
    if isinstance(value, Budgets):
        return value.kind + (
            " per KV head" if value.kind == "sensitivity" and value.per_head else ""
        )
    if isinstance(value, HeadTiers):
        what = "KV heads of layers" if value.per_head else "layers"
        return f"{len(value.others)} more over {len(value.of)} {what}"
    if isinstance(value, Channels):
        return "some removed" if value.active else "all"
    if isinstance(value, Offset):
        return f"a vector per KV head{', and scales' if value.scales else ''}"
    if isinstance(value, tuple) and value and isinstance(value[0], Tier):
        return ", ".join(_tier(t, len(value) > 1) for t in value)
    return value if isinstance(value, str) else json.dumps(value)


def _tier(tier: Tier, shared: bool) -> str:
    text = f"K{tier.key_bits} V{tier.value_bits}"
    return f"{100 * tier.share:g} % {text}" if shared else text
