"""From knobs to the fields of a policy, for a given setting and a given number of slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.knobs.presets import LADDERS, RULES, TIERS
from kvsearch.knobs.vocabulary import Value
from kvsearch.policy import Budgets, ModelShape, Policy, Quantizer
from kvsearch.rules import Rule


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


def recent_window_of(get: Mapping[str, Value], setting: Setting, slots: int | None) -> int:
    """Tokens of the recent window of a policy with so many slots."""
    recent_window = get["recent_window"]
    if recent_window == "half":
        return (slots or 0) // 2
    return setting.shape.layers if recent_window == "layers" else int(recent_window)


def policy_of(
    get: dict[str, Value], setting: Setting, slots: int | None, name: str | None
) -> Policy:
    """The policy that a value for every knob describes.

    Raises:
        PolicyError: the values do not go together.
    """
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
        recent_window=recent_window_of(get, setting, slots),
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
