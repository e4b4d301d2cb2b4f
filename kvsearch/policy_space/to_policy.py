"""From knobs to the fields of a policy, for a given setting and a given number of slots."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.policy import (
    Anchors,
    Budgets,
    Channels,
    HeadLosses,
    ModelShape,
    Offset,
    Policy,
    Quantizer,
    Tier,
)
from kvsearch.policy.pruning import Importance
from kvsearch.policy_space import by_head
from kvsearch.policy_space.axes import Value
from kvsearch.policy_space.channels import PACKED, channels_of
from kvsearch.policy_space.dotted import Storable, changes, ladder_of, rule_of, spelled, tiers_of
from kvsearch.rules import Rule
from kvsearch_kernels.codebooks import CODEBOOKS, Codebook

Get = Mapping[str, Value | None]  # every knob; dotted ones may be None, as the preset says


@dataclass(frozen=True)
class Setting:
    """What a policy is sized for.

    Attributes:
        shape: the model's.
        budget_bytes: per sequence, that the peak may reach, or None for no limit.
        tokens: length of the stream; policies that keep every token grow with it.
        heads: what the KV heads lose, or None if it was not measured.
        prompt: tokens of the stream that one forward call brings in at its start.
        importance: what was measured of the channels, or None.
        learned: SHA-256 of the weights that rule `kvzap` has for the model, empty if it has none;
            None where the model is not known, and a cache looks for them.
        offset: what the model's keys have in common over so many tokens, with scales, or None if
            it was not measured.
        slot_step: a number that slots are multiples of, in a runtime that has them in blocks.
        slot_room: slots beside what is never evicted, at least.
    """

    shape: ModelShape
    budget_bytes: int | None
    tokens: int
    prompt: int = 0
    heads: HeadLosses | None = None
    importance: Importance | None = None
    learned: str | None = None
    offset: Offset | None = None
    slot_step: int = 1
    slot_room: int = 0


def recent_window_of(get: Get, setting: Setting, slots: int | None) -> int:
    """Tokens of the recent window of a policy with so many slots."""
    word = get["recent_window"]
    fields = {**spelled("recent_window", word), **dict(changes("recent_window", get))}
    if fields:
        tokens = int(float(fields["share"]) * (slots or 0))
    else:
        tokens = setting.shape.layers if word == "layers" else int(word or 0)
    if get["along"] == "tokens" and get["fp16_recent"]:
        return _whole(tokens, _group(get, _channels(get, setting).on(setting.shape)))
    return tokens


def _whole(tokens: int, group: int | None) -> int:
    return tokens if group is None else -(-tokens // group) * group


def budgets_of(get: Get, setting: Setting, slots: int | None) -> Budgets:
    """How a policy with so many slots shares them out."""
    sinks, interval = int(get["sinks"] or 0), int(get["interval"] or 1)
    few = max(sinks + recent_window_of(get, setting, slots), sinks + 1) + interval
    most = by_head.FULL if setting.shape.kv_heads < setting.shape.heads else by_head.FULL_MHA
    return by_head.budgets(get, setting.heads, slots, setting.tokens, few, most)


def policy_of(get: Get, setting: Setting, slots: int | None, name: str | None) -> Policy:
    """The policy that a value for every knob describes.

    Raises:
        PolicyError: the values do not go together.
    """
    shape = setting.shape
    channels = _channels(get, setting)
    group = _group(get, channels.on(shape))
    interval, sinks = int(get["interval"] or 1), int(get["sinks"] or 0)
    fp16_sinks = get["fp16_sinks"]
    if get["along"] == "tokens":  # tokens that share scales stay together, and so in step
        interval, sinks = _whole(interval, group), _whole(sinks, group)
        fp16_sinks = fp16_sinks or (slots is not None and sinks > 0)
    ladder = ladder_of(str(get["ladder"]), changes("ladder", get))
    tiers = tiers_of(str(get["tiers"]), changes("tiers", get), _storable(get))
    fields: dict[str, Any] = dict(
        name=name,
        slots=slots,
        interval=interval,
        trigger=get["trigger"],
        sinks=sinks,
        recent_window=recent_window_of(get, setting, slots),
        budgets=budgets_of(get, setting, slots),
        ladder=ladder if slots is not None else None,
        rule=_learned(rule_of(str(get["rule"]), changes("rule", get), interval), setting),
        tiers=tiers,
        head_tiers=by_head.head_tiers(str(get["bits"]), tiers, setting.heads),
        quantizer=_quantizer(
            group=group,
            rotate=get["rotate"],
            value_block=_value_block(get["value_block"] or "head", shape.head_dim),
            levels=get["levels"],
            value_levels=None if get["value_levels"] == "same" else get["value_levels"],
            along=get["along"],
            fp16_sinks=fp16_sinks,
            fp16_recent=get["fp16_recent"],
            offset=_offset(get, setting, tiers),
        ),
        refit=get["refit"] if slots is not None else "none",
        anchors=anchors_of(get),
        channels=channels,
        positions=get["positions"],
    )
    return Policy.build(fields, where=name or "policy")


def _learned(rule: Rule | None, setting: Setting) -> Rule | None:
    """A rule with the weights that it has for the model."""
    if rule is None or "hidden" not in rule.needs or setting.learned is None:
        return rule
    if not setting.learned:
        raise PolicyError(
            f"rule {rule.name!r} has no weights for this model; train them with `kvsearch adapt "
            f"--rule {rule.name}`"
        )
    return rule.model_copy(update={"weights": setting.learned})


def _channels(get: Get, setting: Setting) -> Channels:
    packed = None
    if get["tiers"] != "16":
        packed = next((b.group for b in _books(get) if b.group is not None), PACKED)
    new = dict(changes("channels", get))
    return channels_of(str(get["channels"]), new, setting.importance, setting.shape, packed)


def _books(get: Get) -> tuple[Codebook, Codebook]:
    """Codebooks of keys and of values."""
    levels, values = str(get["levels"]), str(get["value_levels"])
    return CODEBOOKS[levels], CODEBOOKS[levels if values == "same" else values]


def _storable(get: Get) -> Storable:
    """Bits of keys and values that custom tiers are fitted to: what the levels know, and 16."""
    if get["tiers"] != "custom":
        return (), ()
    keys, values = _books(get)
    return (16, *keys.bits), (16, *values.bits)


def _group(get: Get, left: ModelShape) -> int | None:
    """The largest group up to the one asked for that divides every key and value that is left."""
    asked = get["group"]
    if get["tiers"] == "custom":
        asked = next((b.group for b in _books(get) if b.group is not None), asked)
    if asked == "head":
        return None if left.widths else left.head_dim
    group = int(asked or left.head_dim)
    while any(width % group for widths in left.kinds for width in widths):
        group -= 1
    return group


def _offset(get: Get, setting: Setting, tiers: tuple[Tier, ...]) -> Offset | None:
    """None where nothing is below 16 bits, so that equal policies look equal."""
    if get["offset"] == "none" or all(t.native for t in tiers):
        return None
    if setting.offset is None:
        raise PolicyError("knob offset: it needs the model's keys to be measured")
    plain = Offset(keys=setting.offset.keys, sample=setting.offset.sample)
    return setting.offset if get["offset"] == "scaled" else plain


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


def anchors_of(get: Mapping[str, Any]) -> Anchors | None:
    """The anchors that the knobs `anchors` and `anchors.*` describe; None without any.

    Endpoints (`ep`) are tokens that end in one of the marks, new tokens (`ac`) come between
    sentences; `anchors.every` puts either every so many tokens.
    """
    if get["anchors"] == "none":
        return None
    new, every = get["anchors"] == "ac", int(get["anchors.every"])
    return Anchors(
        at=every or ("sentences" if new else "marks"),
        marks=tuple(str(get["anchors.marks"])),
        insert=new,
        embedding=get["anchors.embedding"],
        close=get["anchors.close"],
        isolate=get["anchors.isolate"],
    )
