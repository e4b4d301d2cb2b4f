"""From knobs to the fields of a policy, for a given setting and a given number of slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.knobs import heads
from kvsearch.knobs.channels import channels_of
from kvsearch.knobs.presets import LADDERS, RULES, TIERS
from kvsearch.knobs.vocabulary import Value
from kvsearch.policy import Budgets, HeadLosses, ModelShape, Policy, Quantizer
from kvsearch.policy.pruning import Importance
from kvsearch.rules import Rule


@dataclass(frozen=True)
class Setting:
    """What a policy is sized for.

    Attributes:
        shape: the model's.
        budget_bytes: per sequence, that the peak may reach, or None for no limit.
        tokens: length of the stream; policies that keep every token grow with it.
        sensitivity: measured sensitivity per layer, or empty if it was not measured.
        heads: what was measured of the KV heads, or None.
        prompt: tokens of the stream that one forward call brings in at its start.
        importance: what was measured of the channels, or None.
    """

    shape: ModelShape
    budget_bytes: int | None
    tokens: int
    sensitivity: tuple[float, ...] = ()
    prompt: int = 0
    heads: HeadLosses | None = None
    importance: Importance | None = None


def recent_window_of(get: Mapping[str, Value], setting: Setting, slots: int | None) -> int:
    """Tokens of the recent window of a policy with so many slots."""
    recent_window = get["recent_window"]
    if recent_window == "half":
        return (slots or 0) // 2
    return setting.shape.layers if recent_window == "layers" else int(recent_window)


def budgets_of(get: Mapping[str, Value], setting: Setting, slots: int | None) -> Budgets:
    """How a policy with so many slots shares them out."""
    return heads.budgets(get, setting.sensitivity, setting.heads, slots, setting.tokens)


def policy_of(
    get: dict[str, Value], setting: Setting, slots: int | None, name: str | None
) -> Policy:
    """The policy that a value for every knob describes.

    Raises:
        PolicyError: the values do not go together.
    """
    shape = setting.shape
    channels = channels_of(get, setting.importance, shape)
    group = _group(get["group"], channels.on(shape))
    tiers = TIERS[str(get["tiers"])]
    fields: dict[str, Any] = dict(
        name=name,
        slots=slots,
        interval=int(get["interval"]),
        trigger=get["trigger"],
        sinks=int(get["sinks"]),
        recent_window=recent_window_of(get, setting, slots),
        budgets=budgets_of(get, setting, slots),
        ladder=LADDERS[str(get["ladder"])] if slots is not None else None,
        rule=_rule(str(get["rule"]), int(get["interval"])),
        tiers=tiers,
        head_tiers=heads.head_tiers(str(get["bits"]), tiers, setting.heads),
        quantizer=_quantizer(
            group=group,
            rotate=get["rotate"],
            value_block=_value_block(get["value_block"], shape.head_dim),
            levels=get["levels"],
            along=get["along"],
            fp16_sinks=get["fp16_sinks"],
            fp16_recent=get["fp16_recent"],
        ),
        channels=channels,
        positions=get["positions"],
    )
    return Policy.build(fields, where=name or "policy")


def _group(asked: Value, left: ModelShape) -> int | None:
    """The largest group up to the one asked for that divides every key and value that is left."""
    if asked == "head":
        return None if left.widths else left.head_dim
    group = int(asked)
    while any(width % group for widths in left.kinds for width in widths):
        group -= 1
    return group


def _value_block(block: Value, head_dim: int) -> int | None:
    """None where a block holds all that a rotation mixes, so that equal policies look equal."""
    if block == "head" or int(block) >= head_dim & -head_dim:
        return None
    if int(block).bit_count() > 1:
        raise PolicyError(f"knob value_block: {block} is not a power of two")
    return int(block)


@lru_cache(maxsize=1024, typed=True)
def _quantizer(**fields: Any) -> Quantizer:
    """Validated once, since a search asks for the same few again and again."""
    return Quantizer.model_validate(fields)


@lru_cache(maxsize=1024)
def _rule(name: str, interval: int) -> Rule | None:
    rule = RULES[name]
    return None if rule is None else rule.fitted(interval)
