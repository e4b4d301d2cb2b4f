"""Budgets and bits that follow measurements of layers and KV heads: by power or marginal loss."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from kvsearch.errors import PolicyError
from kvsearch.policy import Budgets, HeadLosses, HeadTiers, Tier
from kvsearch.policy_space.marginal import Split, choose

MEASURED = frozenset({"sensitivity", "heads", "marginal", "full-heads"})  # by what heads lose
SIZED = frozenset({"marginal", "full-heads"})  # of these, those that depend on the slots
FULL, FULL_MHA = 0.5, 0.25  # most heads that keep everything, as published, by kind of attention


def needs_heads(values: Mapping[str, Iterable[object]]) -> bool:
    """Whether policies with such values of their knobs follow what the model's heads lose."""
    return not MEASURED.isdisjoint(values.get("budgets", ())) or any(
        v != "alike" for v in values.get("bits", ())
    )


def budgets(
    get: Mapping[str, Any],
    heads: HeadLosses | None,
    slots: int | None,
    tokens: int,
    few: int = 1,
    most: float = FULL,
) -> Budgets:
    """The budgets that the knobs `budgets`, `exponent` and `beta` describe.

    Args:
        get: a value for every knob.
        heads: what the model's heads lose; None if it was not measured.
        slots: mean over heads; only budgets of `SIZED` depend on it.
        tokens: of the stream.
        few: slots of a head that keeps as little as the policy allows.
        most: share of the heads that may keep everything, with budgets `full-heads`.

    Raises:
        PolicyError: they follow a measurement that was not made.
    """
    kind = str(get["budgets"])
    if kind in MEASURED and heads is None:
        raise PolicyError(f"budgets {kind!r} need the model's heads to be measured")
    if kind == "marginal":
        assert heads is not None
        return _marginal(heads, slots or 1, tokens)
    if kind == "full-heads":
        assert heads is not None
        whole = tokens + int(get["interval"] or 1)  # with headroom, so that they never evict
        return _full_heads(heads, slots or 1, whole, few, most)
    fields: dict[str, Any] = dict(kind=kind, beta=get["beta"], exponent=get["exponent"])
    if kind == "pyramid":
        fields["of"] = "rest"
    if kind == "global":
        fields |= dict(kind="adakv", floor=0.0, across="model")
    if kind == "sensitivity":
        assert heads is not None
        fields["weights"] = heads.of_layers
    if kind == "heads":
        assert heads is not None
        fields |= dict(kind="sensitivity", weights=heads.sensitivity)
    return _budgets(**fields)


@lru_cache(maxsize=1024, typed=True)
def _budgets(**fields: Any) -> Budgets:
    return Budgets.model_validate(fields)


@lru_cache(maxsize=16)
def _split(heads: HeadLosses, tokens: int) -> Split:
    sizes = [s for s in heads.sizes if s < tokens]
    return Split((*sizes, tokens), [[*row[: len(sizes)], 0.0] for row in heads.slots])


def _marginal(heads: HeadLosses, slots: int, tokens: int) -> Budgets:
    got = _split(heads, tokens).at(slots * len(heads.slots)).reshape(-1, heads.heads)
    rows = tuple(tuple(float(f"{x:.4g}") for x in row) for row in got / slots)
    return _budgets(kind="sensitivity", exponent=1.0, weights=rows)


@lru_cache(maxsize=1024)
def _full_heads(heads: HeadLosses, slots: int, whole: int, few: int, most: float) -> Budgets:
    """DuoAttention (arXiv:2410.10819): the heads that lose most have `whole` slots, or none has.

    As many as the total pays for where the others have `few`, and these share what is left evenly.
    Weights are the slots themselves, so that the division is exact.
    """
    lost = [x for row in heads.sensitivity for x in row]
    order, total = sorted(range(len(lost)), key=lambda i: -lost[i]), slots * len(lost)
    spare = max(0, total - few * len(lost))
    full = min(int(most * len(lost)), spare // max(1, whole - few))
    each, more = divmod(total - full * whole, len(lost) - full)
    got = [0.0] * len(lost)
    for place, i in enumerate(order):
        got[i] = float(whole if place < full else each + (place - full < more))
    rows = tuple(tuple(got[i : i + heads.heads]) for i in range(0, len(got), heads.heads))
    return _budgets(kind="sensitivity", exponent=1.0, weights=rows)


@lru_cache(maxsize=1024)
def head_tiers(per: str, tiers: tuple[Tier, ...], heads: HeadLosses | None) -> HeadTiers | None:
    """Bits per layer or per head by marginal loss, at the mean bits of the one tier given.

    Args:
        per: `alike`, `layer` or `head`.
        tiers: the policy's own; the mean over heads keeps to their bits.
        heads: what was measured of the heads.

    Raises:
        PolicyError: there are several tiers, or nothing was measured.
    """
    if per == "alike" or all(t.native for t in tiers):
        return None
    if len(tiers) > 1:
        raise PolicyError("knob bits: bits per layer or head are shared out from a single tier")
    if heads is None:
        raise PolicyError("knob bits: bits per layer or head need the model's KV heads measured")
    (tier,) = tiers
    together = heads.heads if per == "layer" else 1
    keys, values = (
        np.array(x).reshape(-1, together, len(heads.bits)).sum(1)
        for x in (heads.keys, heads.values)
    )
    options = list(product(range(len(heads.bits)), repeat=2))
    losses = [[k[i] + v[j] for i, j in options] for k, v in zip(keys, values, strict=True)]
    costs = [[float(heads.bits[i] + heads.bits[j]) for i, j in options]] * len(losses)
    picked = choose(losses, costs, len(losses) * (tier.key_bits + tier.value_bits))
    used = sorted({*picked}, key=lambda i: (-costs[0][i], i))
    others = tuple(
        (tier.model_copy(update=dict(key_bits=heads.bits[i], value_bits=heads.bits[j])),)
        for i, j in (options[x] for x in used)
    )
    of: Any = [used.index(x) + 1 for x in picked]
    if together == 1:
        of = [of[i : i + heads.heads] for i in range(0, len(of), heads.heads)]
    return HeadTiers.model_validate(dict(others=others, of=of))
