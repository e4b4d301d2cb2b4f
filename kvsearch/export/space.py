"""The search space of a target: what of a space's knobs it can execute, and nothing else."""

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

from kvsearch.errors import KvsearchError, SpaceError, nearest, quoted
from kvsearch.export import TARGETS, find
from kvsearch.export.capability import Capability, Eviction, Format
from kvsearch.export.layers import others_of
from kvsearch.export.project import same_rule
from kvsearch.export.target import Target
from kvsearch.knobs import RULES, Value
from kvsearch.policy import ModelShape
from kvsearch.space import SearchSpace

Axes = dict[str, dict[str, Any]]

SIZES: dict[str, tuple[int, ...]] = {
    "interval": (1, 8, 16, 32, 64),
    "sinks": (0, 4, 8, 16),
    "recent_window": (0, 1, 16, 32, 64, 128),
}
FRACTIONS = (0.4, 0.55, 0.75, 1.0)


def space_of(target: Target, shape: ModelShape, base: SearchSpace) -> SearchSpace:
    """The space that `run --target` searches; for a runtime that executes everything, `base`.

    Raises:
        SpaceError: no policy of the runtime can be searched for on a stream of text, or it does not
            serve such a model.
    """
    can = target.executes
    if can is None:
        if shape.others and target.score is None:
            raise _refusal(target, f"{others_of(shape)}, which it does not serve")
        return base
    formats = [f for f in can.formats if f.fits(shape)]
    if (reason := unsearchable(can, formats)) is not None:
        raise _refusal(target, reason)
    evicts = can.eviction
    axes: Axes = {}
    if evicts is None:
        axes["evict"] = {"choice": [False]}
    else:
        axes["budget_fraction"] = {"choice": list(FRACTIONS)}
        axes |= _rules(evicts)
    wide: dict[str, Any] = {}
    forbid: list[dict[str, Value]] = []
    if formats and (evicts is None or evicts.quantised):
        more, forbid = _formats(formats, shape)
        axes |= more
        wide = {"tiers": "16"}
    if evicts is not None:
        axes |= _schedule(evicts, wide, layers=not shape.others)
    data = {
        "version": 2,
        "name": target.name,
        "about": f"what {target.runtime} {target.version} executes",
        "axes": {k: v for k, v in axes.items() if v},
        "forbid": forbid,
    }
    return SearchSpace.model_validate(data)


def searched(name: str) -> Target:
    """The target called `name`, for a search.

    Raises:
        KvsearchError: there is no such target; those are named that can be searched for.
        SpaceError: nothing that it executes can be searched for, whatever the model.
    """
    if name not in TARGETS:
        known = [n for n in TARGETS if why_not(find(n)) is None]
        raise KvsearchError(f"unknown target {quoted(name)}{nearest(name, known)}")
    target = find(name)
    if (reason := why_not(target)) is not None:
        raise _refusal(target, reason)
    return target


def _refusal(target: Target, reason: str) -> SpaceError:
    return SpaceError(
        f"--target {target.name}: {reason}; search without --target and export what is found"
    )


def why_not(target: Target) -> str | None:
    """Why nothing that the runtime executes can be searched for, whatever the model, or None."""
    can = target.executes
    return None if can is None else unsearchable(can, list(can.formats))


def unsearchable(can: Capability, formats: list[Format]) -> str | None:
    """Why a search on a stream of text finds nothing that the runtime executes, or None."""
    how = can.eviction
    if how is None:
        return None if formats else "it holds every token in 16 bits"
    if "stream" not in how.triggers:
        return "it evicts after a prompt, and a search has none"
    if callable(how.interval):
        return "its interval follows from its slots"
    return None


def _choice(values: Iterable[Value], default: Value) -> dict[str, Any]:
    """An axis, or nothing where there is only the default."""
    found = list(dict.fromkeys(values))
    return {} if found == [default] else {"choice": found}


def _rules(how: Eviction) -> Axes:
    names = [
        name for name, rule in RULES.items() if any(same_rule(rule, r.rule) for r in how.rankings)
    ]
    axes: Axes = {"rule": _choice(names, "none")}
    ranked = [name for name in names if name != "none"]
    if ranked:
        windows = (how.recent_window.fit(n) for n in SIZES["recent_window"])
        axes["recent_window"] = {**_choice(windows, 0), "when": {"rule": ranked}}
    return axes


def _schedule(how: Eviction, wide: dict[str, Any], *, layers: bool) -> Axes:
    """Sinks, interval, positions and budgets, which differ by layer.

    `wide` is what says that nothing is below 16 bits, `layers` whether layers may differ.
    """
    axes: Axes = {"sinks": _choice((how.sinks.fit(n) for n in SIZES["sinks"]), 0)}
    assert not callable(how.interval)
    axes["interval"] = _choice((how.interval.fit(n) for n in SIZES["interval"]), 1)
    if axes["interval"] and wide and not how.exact_when_quantised:
        axes["interval"]["when"] = wide
    axes["positions"] = _choice(how.positions, "original")
    if axes["positions"] and wide and not how.reindexes_quantised:
        axes["positions"]["when"] = wide
    if how.budgets and layers:
        axes["budgets"] = {"choice": ["uniform", "pyramid", "sensitivity"]}
        axes["exponent"] = {"choice": [0.25, 0.5, 0.75, 1.0], "when": {"budgets": "sensitivity"}}
        axes["beta"] = {"choice": [2.0, 5.0, 20.0], "when": {"budgets": "pyramid"}}
    return axes


def _formats(formats: list[Format], shape: ModelShape) -> tuple[Axes, list[dict[str, Value]]]:
    """Axes of the storage formats, and the combinations that are none."""
    when = {"tiers": "custom"}
    points = [knobs_of(f, shape) for f in formats]
    axes: Axes = {"tiers": {"choice": ["16", "custom"]}}
    names = [n for n in points[0] if n != "value_levels" or any(f.value_levels for f in formats)]
    points = [{name: p[name] for name in names} for p in points]
    values = {name: list(dict.fromkeys(p[name] for p in points)) for name in names}
    for name in names:
        axes[name] = {"choice": values[name], "when": when}
    forbid = [{"tiers": "custom", **rule} for rule in _none_of(points, values)]
    return axes, forbid


def knobs_of(f: Format, shape: ModelShape) -> dict[str, Value]:
    """Knobs of a format, beside `tiers: custom`."""
    mixed = shape.head_dim & -shape.head_dim
    block = f.value_block if f.rotate and f.value_block and f.value_block < mixed else None
    return {
        "tiers.key_bits": f.key_bits,
        "tiers.value_bits": f.value_bits,
        "levels": f.levels,
        "value_levels": f.value_levels or "same",
        "group": f.group or "head",
        "rotate": f.rotate,
        "value_block": block or "head",
    }


def _none_of(
    points: list[dict[str, Value]], values: dict[str, list[Value]]
) -> Iterator[dict[str, Value]]:
    """The smallest combinations of values that no point has."""
    found: list[dict[str, Value]] = []
    for count in range(2, len(values) + 1):
        for names in combinations(values, count):
            have = {tuple(p[n] for n in names) for p in points}
            for combination in product(*(values[n] for n in names)):
                rule = dict(zip(names, combination, strict=True))
                covered = any(r.items() <= rule.items() for r in found)
                if combination not in have and not covered:
                    found.append(rule)
                    yield rule
