"""The search space of a target: what of a space's knobs it can execute, and nothing else."""

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from typing import Any

from kvsearch.errors import KvsearchError, SpaceError, nearest, quoted
from kvsearch.exporters import TARGETS, find
from kvsearch.exporters.capability import Capability, Eviction, Format, Ranking, Sizes
from kvsearch.exporters.layers import others_of
from kvsearch.exporters.project import same_rule
from kvsearch.exporters.target import Target
from kvsearch.policy import ModelShape
from kvsearch.policy_space import RULES, SearchSpace, Value

Axes = dict[str, dict[str, Any]]

SIZES: dict[str, tuple[int, ...]] = {
    "interval": (1, 8, 16, 32, 64),
    "sinks": (0, 4, 8, 16),
    "recent_window": (0, 1, 16, 32, 64, 128),
}
FRACTIONS = (0.4, 0.55, 0.75, 1.0)


def space_of(
    target: Target, shape: ModelShape, base: SearchSpace, *, on_prompts: bool = False
) -> SearchSpace:
    """The space that `run --target` searches; for a runtime that executes everything, `base`.

    Args:
        target: the runtime.
        shape: of the model.
        base: the space of a runtime that executes everything.
        on_prompts: whether policies are measured on prompts, and not on a stream of text.

    Raises:
        SpaceError: no policy of the runtime can be searched for, or it does not serve such a model.
    """
    can = target.executes
    if can is None:
        if shape.others and target.score is None:
            raise _refusal(target, f"{others_of(shape)}, which it does not serve")
        return _narrowed(base, target)
    formats = [f for f in can.formats if f.fits(shape)]
    if (reason := unsearchable(can, formats, on_prompts)) is not None:
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
        if can.layers == "below" and not shape.others:
            axes["bits"] = {"choice": ["alike", "layer"], "when": {"tiers": "custom"}}
    if evicts is not None:
        more, rules = _schedule(evicts, wide, layers=not shape.others)
        axes, forbid = axes | more, [*forbid, *rules]
    data = {
        "version": 2,
        "name": target.name,
        "about": f"what {target.runtime} {target.version} executes",
        "axes": {k: v for k, v in axes.items() if v},
        "forbid": forbid,
    }
    return SearchSpace.model_validate(data)


def _narrowed(base: SearchSpace, target: Target) -> SearchSpace:
    """A space without fields and rules that a runtime lacks; itself if it has none of them."""
    kept = {k: v for k, v in base.axes.items() if k.partition(".")[0] not in target.without}
    rule = kept.get("rule")
    if rule is not None and rule.choice is not None:
        choice = tuple(n for n in rule.choice if target.sees(RULES[str(n)]))
        kept["rule"] = rule.model_copy(update={"choice": choice})
    return base if kept == base.axes else base.model_copy(update={"axes": kept})


def searched(name: str, *, on_prompts: bool = False) -> Target:
    """The target called `name`, for a search on a stream of text, or on prompts.

    Raises:
        KvsearchError: there is no such target; those are named that can be searched for.
        SpaceError: nothing that it executes can be searched for, whatever the model.
    """
    if name not in TARGETS:
        known = [n for n in TARGETS if why_not(find(n), on_prompts) is None]
        raise KvsearchError(f"unknown target {quoted(name)}{nearest(name, known)}")
    target = find(name)
    if (reason := why_not(target, on_prompts)) is not None:
        raise _refusal(target, reason)
    return target


def _refusal(target: Target, reason: str) -> SpaceError:
    return SpaceError(
        f"--target {target.name}: {reason}; search without --target and export what is found"
    )


def why_not(target: Target, on_prompts: bool = False) -> str | None:
    """Why nothing that the runtime executes can be searched for, whatever the model, or None."""
    can = target.executes
    return None if can is None else unsearchable(can, list(can.formats), on_prompts)


def unsearchable(can: Capability, formats: list[Format], on_prompts: bool = False) -> str | None:
    """Why a search on a text, or on prompts, finds nothing that the runtime executes, or None."""
    how = can.eviction
    if how is None:
        return None if formats else "it holds every token in 16 bits"
    if "stream" not in how.triggers and not on_prompts:
        return "it evicts after a prompt, and a search on a text has none: give --task or --prompts"
    if callable(how.interval):
        return "its interval follows from its slots"
    return None


def _choice(values: Iterable[Value], default: Value) -> dict[str, Any]:
    """An axis, or nothing where there is only the default."""
    found = list(dict.fromkeys(values))
    return {} if found == [default] else {"choice": found}


def _ranked(how: Eviction) -> dict[str, tuple[Ranking, Value | None]]:
    """Presets by which a runtime ranks: how, and its `rule.share` where that is another.

    Of presets that are one and the same, the last, which has a method's name.
    """
    found: dict[str, tuple[Ranking, Value | None]] = {}
    for name, rule in RULES.items():
        for ranking in how.rankings:
            given, share, mine = ranking.rule, None, rule
            if rule is not None and given is not None and rule.share != given.share:
                share = given.share
                mine = rule.model_copy(update={"share": share})
            if same_rule(mine, given):
                found = {k: v for k, v in found.items() if not same_rule(RULES[k], RULES[name])}
                found[name] = ranking, share
                break
    return found


def _rules(how: Eviction) -> Axes:
    found = _ranked(how)
    axes: Axes = {"rule": _choice(found, "none")}
    if shared := {name: share for name, (_, share) in found.items() if share is not None}:
        choice = list(dict.fromkeys(shared.values()))
        assert len(choice) == 1, "one axis says how heads vote"
        axes["rule.share"] = {"choice": choice, "when": {"rule": list(shared)}}
    return axes


def _sized(how: Eviction, knob: str, default: Value) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """An axis of sizes, of the rules that take others than the default, and what they do not take.

    The recent window says nothing where age ranks.
    """
    known = _ranked(how)
    rules = [name for name in known if knob != "recent_window" or name != "none"]
    sizes: dict[str, Sizes] = {n: getattr(known[n][0], knob) or getattr(how, knob) for n in rules}
    tried = list(dict.fromkeys(s.fit(n) for n in SIZES[knob] for s in sizes.values()))
    takes = {name: [n for n in tried if s.fit(n) == n] for name, s in sizes.items()}
    takes = {name: some for name, some in takes.items() if some != [default]}
    union = [n for n in tried if any(n in some for some in takes.values())]
    if not union:
        return {}, []
    axis: dict[str, Any] = {"choice": union}
    if len(takes) < len(known):
        axis["when"] = {"rule": list(takes)}
    lacks = {name: [n for n in union if n not in some] for name, some in takes.items()}
    return axis, [{"rule": name, knob: none} for name, none in lacks.items() if none]


def _schedule(
    how: Eviction, wide: dict[str, Any], *, layers: bool
) -> tuple[Axes, list[dict[str, Any]]]:
    """Triggers, sinks, recent window, interval, positions and budgets, and what does not go.

    `wide` is what says that nothing is below 16 bits, `layers` whether layers may differ.
    """
    axes: Axes = {"trigger": _choice(how.triggers, "stream")}
    forbid: list[dict[str, Any]] = []
    assert not callable(how.interval)
    for knob, default in (("sinks", 0), ("recent_window", 0), ("interval", 1)):
        axes[knob], rules = _sized(how, knob, default)
        forbid += rules
    if axes["interval"] and wide and not how.exact_when_quantised:
        axes["interval"].setdefault("when", {}).update(wide)
    axes["positions"] = _choice(how.positions, "original")
    if axes["positions"] and wide and not how.reindexes_quantised:
        axes["positions"]["when"] = wide
    if how.budgets and layers:
        axes["budgets"] = {"choice": ["uniform", "pyramid", "sensitivity"]}
        axes["exponent"] = {"choice": [0.25, 0.5, 0.75, 1.0], "when": {"budgets": "sensitivity"}}
        axes["beta"] = {"choice": [2.0, 5.0, 20.0], "when": {"budgets": "pyramid"}}
    return axes, forbid


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
