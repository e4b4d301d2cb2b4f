"""`run --target`: the space and the methods of a search that only finds what a runtime executes."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product

from kvsearch.errors import KvsearchError, PolicyError
from kvsearch.exporters import find, project
from kvsearch.exporters.capability import Capability
from kvsearch.exporters.space import knobs_of, space_of
from kvsearch.policy import Policy, Quantizer, layout
from kvsearch.policy_search.admission import baselines
from kvsearch.policy_space import Axis, SearchSpace, Setting, Value, build, effective, sized
from kvsearch.policy_space.methods import Method, at
from kvsearch.policy_space.portfolio import Portfolio

BITS = ((8, 8), (5, 5), (5, 4), (4, 4))  # of keys and values, that `starts` tries
SINKS = 4


def stepped(name: str, setting: Setting) -> Setting:
    """The setting with slots that come in the runtime's blocks, where it evicts in some."""
    can = find(name).executes
    if can is None or can.eviction is None:
        return setting
    return replace(setting, slot_step=can.eviction.slots.step, slot_room=can.eviction.room)


def aim(name: str, base: SearchSpace, setting: Setting) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space of a target, and the published methods that it cannot run.

    Args:
        name: of the target.
        base: the space of a runtime that executes everything.
        setting: what policies are sized for.

    Raises:
        KvsearchError: nothing that the runtime executes can be searched for, or fits the budget.
    """
    target = find(name)
    space = space_of(target, setting.shape, base, on_prompts=setting.prompt > 0)
    if target.executes is None:
        if not target.without:
            return space, ()
    elif target.executes.eviction is None:
        _fits(name, setting)
    compared = [n for n, _ in baselines(on_prompts=setting.prompt > 0)]
    return space, tuple(m for m in compared if not _runs(m, name, setting))


def starts(name: str, space: SearchSpace, setting: Setting) -> Portfolio:
    """The runtime's own ways, as its users would set them by hand.

    Of a runtime that evicts after a prompt that is each of its rules, with the first of its sizes,
    in 16 bits and in its first format. Of one that executes everything it is its own cache types in
    all layers, every token kept, where that fits the budget. Of others it is sinks and a window in
    its formats: of keys and values in so many bits one format each, the first of the space that
    fits, rotated where the runtime can.

    Args:
        name: of the target.
        space: what it executes.
        setting: what policies are sized for.
    """
    axes, own = space.axes, find(name).own
    if own is not None:
        return _whole(name, own, setting)
    if "trigger" in axes and find(name).executes is not None:
        return _by_rule(name, space, setting)
    if "custom" not in values(axes, "tiers"):
        return ()
    found: dict[str, Method] = {}
    formats = product(
        BITS, sorted(values(axes, "rotate"), reverse=True), values(axes, "levels"),
        values(axes, "group"), values(axes, "value_block"),
        values(axes, "value_levels") or ("same",),
    )  # fmt: skip
    for (key, value), rotate, levels, group, block, value_levels in formats:
        label = f"window+k{key}v{value}"
        knobs: dict[str, Value] = {
            "tiers": "custom", "tiers.key_bits": key, "tiers.value_bits": value,
            "rotate": rotate, "levels": levels, "group": group, "value_block": block,
            **({} if value_levels == "same" else {"value_levels": value_levels}),
        }  # fmt: skip
        if SINKS in values(axes, "sinks"):
            knobs["sinks"] = SINKS
        if find(name).executes is not None and "evict" in axes:
            knobs["evict"] = False
        params = space.params(knobs)
        if label in found or params is None or space.forbidden(params) is not None:
            continue
        with suppress(PolicyError):
            build(knobs, setting)
            found[label] = Method(knobs, "combined", f"{name}: sinks and a window in its formats")
    return tuple(found.items())


def _whole(name: str, own: Capability, setting: Setting) -> Portfolio:
    """The cache types that hold all layers, by their names."""
    found: dict[str, Method] = {}
    for f in own.formats:
        if f.fits(setting.shape) and not f.ends:
            knobs: dict[str, Value] = {
                "evict": False, "tiers": "custom", **knobs_of(f, setting.shape)
            }  # fmt: skip
            _, peak = sized(knobs, setting)
            if setting.budget_bytes is None or peak <= setting.budget_bytes:
                found[f.word] = Method(knobs, "combined", f"{name}: every token in {f.word}")
    return tuple(found.items())


def _by_rule(name: str, space: SearchSpace, setting: Setting) -> Portfolio:
    """A point for each rule, in 16 bits and below; axes at their default, or at a first value."""
    found: dict[str, Method] = {}
    tiers = values(space.axes, "tiers") or ("16",)
    for rule, stored in product(values(space.axes, "rule"), tiers):
        knobs: dict[str, Value] = {"rule": rule, "tiers": stored}
        for axis, one in space.axes.items():
            if all(effective(k, knobs) in _listed(wanted) for k, wanted in one.when.items()):
                no = [_listed(f[axis]) for f in space.forbid if f.keys() == {"rule", axis}
                      and f["rule"] == rule]  # fmt: skip
                mine = [v for v in one.values if not any(v in values for values in no)]
                usual = None if "." in axis else effective(axis, knobs)
                knobs[axis] = usual if usual is not None and usual in mine else mine[0]
        label = f"{rule}/{name}"
        if stored != "16":
            label = f"{rule}+k{knobs['tiers.key_bits']}v{knobs['tiers.value_bits']}/{name}"
        with suppress(PolicyError):
            build(knobs, setting)
            found[label] = Method(knobs, "combined", f"{name}: its eviction by {rule}")
    return tuple(found.items())


def _listed(wanted: Value | list[Value]) -> list[Value]:
    return wanted if isinstance(wanted, list) else [wanted]


def values(axes: Mapping[str, Axis], name: str) -> tuple[Value, ...]:
    """Values of an axis of choices; none where there is no such axis."""
    return (axes[name].choice or ()) if name in axes else ()


def _runs(method: str, name: str, setting: Setting) -> bool:
    try:
        policy = at(method, setting)
    except PolicyError:  # needs a measurement: such a method ranks by layers or heads
        return False
    given = project(policy, find(name), setting.shape)
    layers = setting.shape.layers
    return given.canonical(layers) == policy.canonical(layers)


def _fits(name: str, setting: Setting) -> None:
    """Whether the narrowest format of a runtime that keeps every token fits the budget."""
    target, shape = find(name), setting.shape
    assert target.executes is not None
    sizes = [
        layout(
            Policy(tiers=(f.tier(),), quantizer=f.applied(Quantizer(), shape)), shape
        ).bytes_peak(setting.tokens)
        for f in target.executes.formats
        if f.fits(shape)
    ]
    if setting.budget_bytes is not None and min(sizes) > setting.budget_bytes:
        raise KvsearchError(
            f"{name} keeps every token: {setting.tokens} tokens take {min(sizes):,} bytes or more, "
            f"more than the budget of {setting.budget_bytes:,}; raise --budget, lower --context"
        )
