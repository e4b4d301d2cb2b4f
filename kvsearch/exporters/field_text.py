"""The value of a policy's field in a few words, for tables."""

import json
from typing import Any

from kvsearch.policy import Anchors, Budgets, Channels, HeadTiers, Ladder, Tier
from kvsearch.rules import Rule

MOST = 34  # characters


def field_text(value: Any) -> str:
    """A field's value; long ones are cut."""
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
    if isinstance(value, tuple) and value and isinstance(value[0], Tier):
        return ", ".join(_tier(t, len(value) > 1) for t in value)
    return value if isinstance(value, str) else json.dumps(value)


def _tier(tier: Tier, shared: bool) -> str:
    text = f"K{tier.key_bits} V{tier.value_bits}"
    return f"{100 * tier.share:g} % {text}" if shared else text
