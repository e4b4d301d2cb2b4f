"""The fields of a policy as an export speaks of them, and the verdict on each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvsearch.policy import Policy, Quantizer

Word = Literal["exact", "approximate", "dropped"]


@dataclass(frozen=True)
class Field:
    """A field.

    Attributes:
        default: its default.
        used: whether a policy does what the field says how to do; of fields whose default is one
            way of several, not "off".
    """

    default: Any
    used: Callable[[Policy], bool] | None = None


def _quantizer_fields() -> dict[str, Field]:
    choices = {"levels", "group"}
    return {
        f"quantizer.{name}": Field(
            info.default, (lambda p: p.quantizes) if name in choices else None
        )
        for name, info in Quantizer.model_fields.items()
    }


def _fields() -> dict[str, Field]:
    choices = {"interval", "trigger"}
    plain = [n for n in Policy.model_fields if n not in ("schema_", "name", "about", "quantizer")]
    return {
        name: Field(
            Policy.model_fields[name].get_default(call_default_factory=True),
            (lambda p: p.compacts) if name in choices else None,
        )
        for name in plain
    }


FIELDS: dict[str, Field] = _fields() | _quantizer_fields()


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
    other = with_value(policy, name, FIELDS[name].default)
    return other.canonical(layers) != policy.canonical(layers)


def verdicts(asked: Policy, given: Policy, layers: int | None = None) -> list[Verdict]:
    """What becomes of every field that is not at its default, or not as it was asked.

    Args:
        asked: the policy.
        given: what a runtime runs for it.
        layers: of the model, if known; ladders are then compared by their integers.
    """
    out = []
    for name, field in FIELDS.items():
        a, g = value(asked, name), value(given, name)
        word: Word = "exact"
        if a != g:
            off = g == field.default if field.used is None else not field.used(given)
            word = "dropped" if off else "approximate"
        if a != field.default or word != "exact":
            out.append(Verdict(name, a, g, word))
    return out
