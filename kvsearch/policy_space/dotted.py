"""Dotted knobs: numbers that refine the preset which the knob before the dot names.

Every draw of them is legal: shares are of what the tiers above leave, and bits are at most those of
the tier above. Neighbouring tiers of the same bits become one, empty ones go, so what holds the
same is the same policy, whether a preset or its numbers name it.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from kvsearch.errors import PolicyError, quoted
from kvsearch.policy import Ladder, Tier
from kvsearch.policy_space import channels
from kvsearch.policy_space.axes import KNOBS, Value
from kvsearch.policy_space.presets import LADDERS, RULES, TIERS
from kvsearch.policy_space.rule_axes import NONE
from kvsearch.rules import Rule, read

Changes = tuple[tuple[str, Value], ...]  # field of a preset -> value
Storable = tuple[tuple[int, ...], tuple[int, ...]]  # bits of keys, of values

BASES = ("rule", "ladder", "tiers", "recent_window", "channels")
WINDOW_SHARES = {"half": 0.5, "share": 0.5}
HALF = 0.5  # of what is left, for a tier whose share nothing names
DIGITS = 6  # of a share; fingerprints have as many


def effective(knob: str, knobs: Mapping[str, Value]) -> Value | None:
    """The value of `knob` among `knobs`: its own, else its preset's, else the default."""
    if knob in knobs:
        return knobs[knob]
    base, dot, field = knob.partition(".")
    if dot and base in BASES:
        return spelled(base, effective(base, knobs)).get(field)
    return KNOBS[knob].default


def has_field(base: str, preset: Value | None, field: str) -> bool:
    """Whether the knob `<base>.<field>` refines a preset."""
    if base == "tiers":  # any list of them may get more
        return True
    return base not in BASES or field in spelled(base, preset)


@lru_cache(maxsize=1024, typed=True)
def spelled(base: str, preset: Value | None) -> Mapping[str, Value]:
    """A preset by its numbers: field -> value; empty for one that has none."""
    if base == "rule":
        rule = RULES[str(preset)]
        return {} if rule is None else {f: _word(getattr(rule, f)) for f in rule.axes}
    if base == "ladder":
        ladder = LADDERS[str(preset)]
        return {} if ladder is None else ladder.model_dump()
    if base == "tiers":
        return _spelled_tiers(TIERS[str(preset)])
    if base == "channels":
        return channels.spelled(str(preset))
    share = WINDOW_SHARES.get(str(preset))
    return {} if share is None else {"share": share}


def respelled(base: str, preset: Value, other: Value) -> dict[str, Value] | None:
    """Dotted knobs that turn the preset `other` into `preset`; None if none do."""
    mine, theirs = spelled(base, preset), spelled(base, other)
    alike = base != "channels"  # whose laws differ in more than numbers
    if base == "rule":
        alike = type(RULES[str(preset)]) is type(RULES[str(other)])
    if preset != other and not (mine and theirs and alike):
        return None
    return {f"{base}.{f}": v for f, v in mine.items() if v != theirs.get(f)}


def changes(base: str, get: Mapping[str, Value | None]) -> Changes:
    """Fields of the preset that `get[base]` names, as its dotted knobs in `get` change them.

    Raises:
        PolicyError: the preset has no such field.
    """
    found = []
    for knob, field in _DOTTED[base]:
        value = get[knob]
        if value is not None:
            if not has_field(base, get[base], field):
                raise PolicyError(f"knob {knob}: {base} {quoted(get[base])} has no {field}")
            found.append((field, value))
    return tuple(found)


_DOTTED = {b: [(k, k.partition(".")[2]) for k in KNOBS if k.startswith(f"{b}.")] for b in BASES}


@lru_cache(maxsize=4096, typed=True)
def rule_of(preset: str, new: Changes, interval: int) -> Rule | None:
    """A rule preset, refined, with numbers that go with `interval`."""
    rule = RULES[preset]
    if rule is None:
        return None
    if new:
        fields = {f: None if v == NONE and isinstance(v, str) else v for f, v in new}
        try:
            rule = read({**rule.model_dump(), **fields})
        except ValueError as e:
            raise PolicyError(f"knob {e}") from e
    assert isinstance(rule, Rule)
    return rule.fitted(interval)


@lru_cache(maxsize=4096, typed=True)
def ladder_of(preset: str, new: Changes) -> Ladder | None:
    """A ladder preset, refined."""
    ladder = LADDERS[preset]
    return ladder if ladder is None else Ladder.model_validate({**ladder.model_dump(), **dict(new)})


@lru_cache(maxsize=4096, typed=True)
def tiers_of(preset: str, new: Changes, storable: Storable = ((), ())) -> tuple[Tier, ...]:
    """A list of tiers, refined: every tier takes its share of what those above leave.

    Args:
        preset: a key of `TIERS`.
        new: what differs from it.
        storable: bits of keys and of values to choose from, at most as many as are asked for where
            that can be; empty takes them as they are, for `Policy` to judge.
    """
    if not new:
        return TIERS[preset]
    numbers: dict[str, Any] = {**_spelled_tiers(TIERS[preset]), **dict(new)}
    count, left, key, value = int(numbers["count"]), 1.0, max(_BITS), max(_BITS)
    parts: list[tuple[float, int, int]] = []
    for i in range(1, count + 1):
        tail = _tail(i)
        key = min(key, int(numbers.get(f"key_bits{tail}", key)))
        value = min(value, int(numbers.get(f"value_bits{tail}", value)))
        part = 1.0 if i == count else float(numbers.get(f"share{tail}", HALF))
        bits = (_fitted(key, storable[0]), _fitted(value, storable[1]))
        share = round(part * left, DIGITS)
        left = round(left - share, DIGITS)
        if share > 0 and parts and parts[-1][1:] == bits:
            parts[-1] = (round(parts[-1][0] + share, DIGITS), *bits)
        elif share > 0:
            parts.append((share, *bits))
    return tuple(Tier.model_validate(dict(share=s, key_bits=k, value_bits=v)) for s, k, v in parts)


_BITS = KNOBS["tiers.key_bits"].only


def _spelled_tiers(tiers: tuple[Tier, ...]) -> dict[str, Value]:
    out: dict[str, Value] = {"count": len(tiers)}
    left = 1.0
    for i, tier in enumerate(tiers, start=1):
        tail = _tail(i)
        out |= {f"key_bits{tail}": tier.key_bits, f"value_bits{tail}": tier.value_bits}
        if i < len(tiers):
            out[f"share{tail}"] = round(tier.share / left, DIGITS)
            left -= tier.share
    return out


def _fitted(bits: int, storable: tuple[int, ...]) -> int:
    if not storable:
        return bits
    return max((b for b in storable if b <= bits), default=min(storable))


def _tail(tier: int) -> str:
    return "" if tier == 1 else str(tier)


def _word(value: Any) -> Value:
    return NONE if value is None else value
