"""From knobs to the fields of a policy, for a given setting and a given number of slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.knobs.refine import changes, ladder_of, rule_of, spelled, tiers_of
from kvsearch.knobs.vocabulary import Value
from kvsearch.policy import Budgets, ModelShape, Policy, Quantizer

Get = Mapping[str, Value | None]  # every knob; dotted ones may be None, as the preset says


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


def recent_window_of(get: Get, setting: Setting, slots: int | None) -> int:
    """Tokens of the recent window of a policy with so many slots."""
    word = get["recent_window"]
    fields = {**spelled("recent_window", word), **dict(changes("recent_window", get))}
    if fields:
        tokens = int(float(fields["share"]) * (slots or 0))
    else:
        tokens = setting.shape.layers if word == "layers" else int(word or 0)
    whole_groups = get["along"] == "tokens" and get["fp16_recent"]
    return _whole(tokens, group_of(get, setting)) if whole_groups else tokens


def group_of(get: Get, setting: Setting) -> int:
    """Channels, or tokens, that share a scale: the largest divisor of the head size up to it."""
    size = setting.shape.head_dim
    group = size if get["group"] == "head" else min(size, int(get["group"] or size))
    while size % group:
        group -= 1
    return group


def _whole(tokens: int, group: int) -> int:
    return -(-tokens // group) * group


def policy_of(get: Get, setting: Setting, slots: int | None, name: str | None) -> Policy:
    """The policy that a value for every knob describes.

    Raises:
        PolicyError: the values do not go together.
    """
    group, interval, sinks = (
        group_of(get, setting),
        int(get["interval"] or 1),
        int(get["sinks"] or 0),
    )
    fp16_sinks = get["fp16_sinks"]
    if get["along"] == "tokens":  # tokens that share scales stay together, and so in step
        interval, sinks = _whole(interval, group), _whole(sinks, group)
        fp16_sinks = fp16_sinks or (slots is not None and sinks > 0)
    kind = get["budgets"]
    if kind == "sensitivity" and not setting.sensitivity:
        raise PolicyError("budgets 'sensitivity' needs the model's sensitivity to be measured")
    weights = setting.sensitivity if kind == "sensitivity" else ()
    of = "rest" if kind == "pyramid" else "total"
    ladder = ladder_of(str(get["ladder"]), changes("ladder", get))
    fields: dict[str, Any] = dict(
        name=name,
        slots=slots,
        interval=interval,
        trigger=get["trigger"],
        sinks=sinks,
        recent_window=recent_window_of(get, setting, slots),
        budgets=_part(
            Budgets,
            kind=kind,
            beta=get["beta"],
            of=of,
            exponent=get["exponent"],
            weights=weights,
        ),
        ladder=ladder if slots is not None else None,
        rule=rule_of(str(get["rule"]), changes("rule", get), interval),
        tiers=tiers_of(str(get["tiers"]), changes("tiers", get)),
        quantizer=_part(
            Quantizer,
            group=group,
            rotate=get["rotate"],
            levels=get["levels"],
            along=get["along"],
            fp16_sinks=fp16_sinks,
            fp16_recent=get["fp16_recent"],
        ),
        positions=get["positions"],
    )
    return Policy.build(fields, where=name or "policy")


@lru_cache(maxsize=1024, typed=True)
def _part(what: type[Budgets] | type[Quantizer], **fields: Any) -> Budgets | Quantizer:
    """A part of a policy; validated once, since a search asks for the same few again and again."""
    return what.model_validate(fields)
