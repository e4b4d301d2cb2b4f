"""How many slots each layer, or each KV head, gets of a policy's total.

A policy whose heads differ is priced as a model with as many layers as there are heads, of one KV
head each: `units` says which of the two shapes counts.
"""

from collections.abc import Sequence
from functools import lru_cache

from kvsearch.errors import PolicyError
from kvsearch.policy.ladder import Rungs, rungs
from kvsearch.policy.parts import Budgets
from kvsearch.policy.policy import Policy
from kvsearch.policy.shape import ModelShape

Slots = tuple[int, ...] | tuple[None, ...]


def units(policy: Policy, shape: ModelShape) -> ModelShape:
    """The shape whose layers are what the policy gives slots and tiers to: layers, or heads."""
    return by_head(shape) if policy.per_head else shape


@lru_cache(maxsize=64)
def by_head(shape: ModelShape) -> ModelShape:
    """A shape whose layers are the KV heads of `shape`."""
    each = tuple(w for w in shape.widths for _ in range(shape.kv_heads))
    return ModelShape(
        shape.layers * shape.kv_heads, 1, shape.head_dim, shape.heads // shape.kv_heads, each
    )


def ladder_of(policy: Policy, shape: ModelShape) -> Rungs | None:
    """Integers of the policy's ladder over the layers of `shape`, if it has one."""
    ladder = policy.ladder
    return None if ladder is None else rungs(shape.layers, ladder.span, ladder.overlap)


def spared(policy: Policy, recent_window: int, rung: Rungs | None) -> int:
    """Newest slots that are never evicted, or that a ladder keeps off so that a whole one fits.

    It may still reach up to `R - 1` slots into the recent window, as LaCache's own code does, but
    not where the recent window is in 16 bits: older tokens, already rounded, would move into it.
    """
    if rung is None:
        return recent_window
    whole = recent_window if policy.fp16_recent else 0
    return max(recent_window, whole + rung.R - 1)


def least(policy: Policy, shape: ModelShape | None, recent_window: int) -> int:
    """Fewest slots with which one layer can run `policy` with such a recent window.

    Without a model a ladder is not known yet, and the true number may be higher.
    """
    rung = None if shape is None else ladder_of(policy, shape)
    kept = policy.sinks + spared(policy, recent_window, rung) + _protected(policy)
    if policy.quantizes and policy.quantizer.along == "tokens":
        kept += policy.interval  # a group is never cut before all of it has been quantised
    if rung is not None:
        return kept + rung.A + policy.interval
    return max(max(kept, policy.sinks + 1) + policy.interval, _together(policy))


def _together(policy: Policy) -> int:
    """Tokens that the policy's rule keeps or drops together."""
    return 1 if policy.rule is None else policy.rule.together


def _protected(policy: Policy) -> int:
    """Tokens beyond the sinks that anchors leave in full, as far as they are known."""
    return 0 if policy.anchors is None else len(policy.anchors.kept(policy.sinks)[1])


def require_slots(policy: Policy, shape: ModelShape | None = None) -> int:
    """Check that the slots hold what a policy never evicts, on a model or as far as is known.

    Returns:
        The fewest slots, see `least`.

    Raises:
        PolicyError: there are fewer.
    """
    slots, recent_window = policy.slots, policy.recent_window
    floor = least(policy, shape, recent_window)
    if slots is not None and slots < (long := _together(policy)):
        raise PolicyError(
            f"field rule.length: a chunk of {long} tokens is longer than the {slots} slots; give a "
            "shorter one"
        )
    if slots is not None and slots < floor:
        parts = f"{policy.sinks} sinks + {recent_window} recent tokens + interval {policy.interval}"
        if more := _protected(policy):
            parts += f" + {more} protected tokens"
        if shape is not None and (rung := ladder_of(policy, shape)) is not None:
            parts += f" + {rung.A} of a ladder"
        raise PolicyError(
            f"field slots: {slots} slots are fewer than the {floor} that {parts} need"
        )
    return floor


def require_prompt(policy: Policy, slots: int | None, prompt: int) -> None:
    """Check that the `slots` of a layer hold a prompt that anchors keep in full.

    Raises:
        PolicyError: there are fewer.
    """
    anchors = policy.anchors
    if slots is None or anchors is None or anchors.protected != "prompt":
        return
    beside = len(anchors.kept(policy.sinks, prompt)[1])
    need = policy.sinks + beside + policy.recent_window + policy.interval
    if need > slots:
        raise PolicyError(
            f"field anchors.protected: 'prompt' keeps a prompt of {prompt} tokens in full, for "
            f"which a layer needs {need} slots and has {slots}; raise slots or shorten the prompt"
        )


def share_out(policy: Policy, shape: ModelShape) -> Slots:
    """Slots of each unit.

    Raises:
        PolicyError: they cannot hold what the policy promises never to evict.
    """
    slots, many = policy.slots, units(policy, shape).layers
    if slots is None:
        return (None,) * many
    floor = require_slots(policy, shape)
    weights = _weights(policy.budgets, shape.layers, many // shape.layers)
    if weights is None:
        return (slots,) * many
    if policy.budgets.of == "rest":
        rest = _in_proportion(weights, (slots - floor) * many, 0)
        return tuple(floor + n for n in rest)
    return tuple(_in_proportion(weights, slots * many, floor))


@lru_cache(maxsize=256)
def _weights(budgets: Budgets, layers: int, each: int) -> tuple[float, ...] | None:
    """Share of every unit, in any unit, `each` of them a layer; None where all are alike."""
    if budgets.kind in ("uniform", "adakv"):
        return None
    if budgets.kind == "pyramid":
        top, bottom = 2 - 1 / budgets.beta, 1 / budgets.beta
        rows: Sequence[float | tuple[float, ...]] = [
            top + (bottom - top) * i / max(1, layers - 1) for i in range(layers)
        ]
    else:
        rows = budgets.weights
    power = budgets.exponent if budgets.kind == "sensitivity" else 1.0
    return tuple(w**power for row in rows for w in _row(row, each))


def _row(row: float | tuple[float, ...], each: int) -> tuple[float, ...]:
    return row if isinstance(row, tuple) else (row,) * each


def _in_proportion(weights: Sequence[float], total: int, floor: int) -> list[int]:
    """Integers at least `floor`, summing to `total`, in proportion to `weights` above the floor."""
    n = len(weights)
    fixed: set[int] = set()
    free = list(range(n))
    while True:
        room = total - floor * len(fixed)
        scale = room / sum([weights[i] for i in free]) if free else 0.0
        low = [i for i in free if weights[i] * scale < floor]
        if not low:
            break
        fixed.update(low)
        free = [i for i in free if i not in fixed]
    exact = [floor if i in fixed else weights[i] * scale for i in range(n)]
    out = [int(x) for x in exact]
    by_rest = sorted(range(n), key=lambda i: (out[i] - exact[i], i))
    for i in by_rest[: total - sum(out)]:
        out[i] += 1
    return out
