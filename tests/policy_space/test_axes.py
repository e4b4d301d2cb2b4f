"""Numeric axes: presets by their numbers, one policy for what behaves alike, even draws."""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import optuna
import pytest

from kvsearch import policy_space as space
from kvsearch.errors import KvsearchError, PolicyError
from kvsearch.policy import ModelShape, check
from kvsearch.policy_search.samplers import Context, check_space, pool
from kvsearch.policy_space import (
    KNOBS,
    LADDERS,
    RULES,
    TIERS,
    Axis,
    Setting,
    Value,
    build,
    drawn,
    respelled,
)
from kvsearch.policy_space import dotted as dotted_knobs
from kvsearch.policy_space.features import every_name, names_for
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.naming import name_of
from kvsearch.rules import RULES as CLASSES
from tests.heads import losses
from tests.importance import importance
from tests.random_policies import offset

optuna.logging.set_verbosity(optuna.logging.ERROR)

SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)
SETTING = Setting(
    SHAPE, SHAPE.budget_bytes(256), 4096, importance=importance(SHAPE), heads=losses(SHAPE),
    offset=offset(SHAPE),
)  # fmt: skip
AFTER = replace(SETTING, prompt=4000)
UNIFIED = space.load("unified")
PROMPTED = [n for n, rule in CLASSES.items() if "rereading" in rule.needs]  # need trigger `prompt`
PRESETS = {
    "rule": {n: "none" if r is None else r.name for n, r in RULES.items()},
    "ladder": {n: "none" if x is None else "custom" for n, x in LADDERS.items()},
    "tiers": dict.fromkeys(TIERS, "custom"),
    "recent_window": {"half": "share"},
}
BY_NUMBERS = [(b, name, plain) for b, found in PRESETS.items() for name, plain in found.items()]


def made(**knobs: Value) -> str:
    """The fingerprint of a policy with so many knobs off their defaults."""
    rule = RULES[str(knobs.get("rule", "none"))]
    when: dict[str, Value] = {"trigger": "prompt"} if rule and "rereading" in rule.needs else {}
    return build({"interval": 16, **when, **knobs}, AFTER if when else SETTING).fingerprint(30)


@pytest.mark.parametrize(("base", "preset", "plain"), BY_NUMBERS)
def test_a_preset_is_its_numbers(base: str, preset: str, plain: str) -> None:
    numbers = respelled(base, preset, plain)
    assert numbers is not None and set(numbers) <= set(KNOBS)
    assert made(**{base: plain, **numbers}) == made(**{base: preset})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tiers": "k4v4"}, {"tiers": "custom", "tiers.count": 3}),
        ({"tiers": "16"}, {"tiers": "k4v4", "tiers.key_bits": 16, "tiers.value_bits": 16}),
        ({"tiers": "k4v2"}, {"tiers": "8-4", "tiers.share": 0.0, "tiers.value_bits2": 2}),
        ({"tiers": "k8v8"}, {"tiers": "8-4", "tiers.share": 1.0}),
        ({"tiers": "k3v3"}, {"tiers": "8-4", "tiers.key_bits": 3, "tiers.value_bits": 3}),
        (
            {"tiers": "8-4", "tiers.share": 0.44},
            {
                "tiers": "xmu-0.4",
                "tiers.count": 3,
                "tiers.share": 0.2,
                "tiers.share2": 0.3,
                "tiers.key_bits2": 8,
                "tiers.value_bits2": 16,
                "tiers.key_bits3": 4,
                "tiers.value_bits3": 4,
            },
        ),
        ({"rule": "tova"}, {"rule": "xmu-forget", "rule.horizon": 1, "rule.share": "layer"}),
        ({"rule": "xmu"}, {"rule": "xmu-forget", "rule.horizon": "none"}),
        ({"rule": "h2o"}, {"rule": "h2o", "rule.pool_kind": "max", "rule.literal": True}),
        ({"rule": "snapkv"}, {"rule": "snapkv", "rule.horizon": 40}),  # 16-token intervals
        ({"ladder": "none"}, {"rule": "none", "budgets": "pyramid", "beta": 1.0}),
        ({"budgets": "uniform"}, {"budgets": "sensitivity", "exponent": 0.0}),
        ({"recent_window": "half"}, {"recent_window": "share"}),
        (
            {"rule": "h2o", "ladder": "custom", "ladder.order": "contiguous"},
            {"rule": "h2o", "ladder": "half-overlap"},
        ),
    ],
)
def test_what_behaves_alike_is_one_policy(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert made(**one) == made(**other)


def test_any_numbers_of_tiers_are_legal() -> None:
    rng = random.Random(0)
    axes = {k: v for k, v in UNIFIED.axes.items() if k.startswith("tiers.")}
    for _ in range(300):
        numbers = {}
        for name, axis in axes.items():
            share = "share" in name and rng.choice([None, 0.0, 1.0])
            numbers[name] = share or pool.values(axis, axis.values[0])[-1]
            if axis.choice is not None:
                numbers[name] = rng.choice(axis.choice)
        numbers["tiers.count"] = rng.choice([1, 2, 3])
        tiers = build({"tiers": "custom", **numbers}, SETTING).tiers
        assert sum(t.share for t in tiers) == pytest.approx(1, abs=1e-9)
        for above, below in pairwise(tiers):
            a, b = (above.key_bits, above.value_bits), (below.key_bits, below.value_bits)
            assert a != b and a[0] >= b[0] and a[1] >= b[1]


@pytest.mark.parametrize(
    ("knobs", "sentence"),
    [
        ({"rule.alpha": 1.0}, "knob rule.alpha: rule 'none' has no alpha"),
        ({"rule": "keydiff", "rule.lag": 8}, "knob rule.lag: rule 'keydiff' has no lag"),
        ({"rule": "h2o", "rule.alpha": 3.0}, "knob rule.alpha: 3.0 must be at most 2"),
        ({"rule": "h2o", "rule.pool": 4}, "knob rule: pool must be odd, got 4"),
        ({"rule": "h2o", "rule.horizon": "all"}, "knob rule.horizon: unknown value 'all'"),
        ({"rule": "lagkv", "rule.lag": 1}, "knob rule.lag: 1 must be at least 2"),
        ({"ladder.span": 0.5}, "knob ladder.span: ladder 'none' has no span"),
        ({"recent_window": 8, "recent_window.share": 0.5}, "recent_window 8 has no share"),
        ({"tiers.key_bits": 6}, "knob tiers.key_bits: 6 is not one of 16, 8, 5, 4"),
        ({"tiers.count": float("inf")}, "knob tiers.count: inf is not a whole number"),
    ],
)
def test_a_wrong_number_is_told_by_its_path(knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError) as error:
        build(knobs, SETTING)
    assert sentence in str(error.value)


def test_every_draw_is_a_policy_or_a_sentence() -> None:
    rng, built, shapes = (
        random.Random(1),
        0,
        (SHAPE, ModelShape(2, 1, 16, 1), ModelShape(1, 2, 80, 4)),
    )
    for turn in range(660):
        shape = shapes[turn % len(shapes)]
        measured = rng.random() < 0.9
        heads = losses(shape) if measured else None
        slots, tokens = rng.choice([8, 40, 256, 2000]), rng.choice([64, 1024])
        scored = importance(shape) if measured else None
        setting = Setting(
            shape, shape.budget_bytes(slots), tokens, heads=heads, importance=scored,
            offset=offset(shape) if measured else None,
        )  # fmt: skip
        knobs = pool.anything(UNIFIED, rng)
        try:
            policy = build(knobs, setting)
            check(policy, shape)
        except PolicyError as e:
            assert "\n" not in str(e)
            continue
        built += 1
        assert policy.parse(policy.to_json()) == policy
    assert built > 120


def test_any_field_with_any_rule_is_a_policy_or_a_sentence() -> None:
    rng, rules = random.Random(2), [*RULES]
    dotted = [k for k in KNOBS if k.startswith("rule.")]
    for _ in range(300):
        knob = rng.choice(dotted)
        known = KNOBS[knob]
        low, high = max(known.low, 0), min(known.high, 4096)
        value: Value = rng.choice([*known.names, *((low, high) if known.number else ())])
        value = rng.choice([True, False]) if known.number is bool else value
        rule = rng.choice(rules)
        has = dotted_knobs.has_field("rule", rule, knob.partition(".")[2])
        try:
            policy = build({"rule": rule, "interval": 16, knob: value}, SETTING)
        except PolicyError as e:
            assert "has no" in str(e) or has
            continue
        assert has and policy.rule is not None
        assert type(policy.rule) is type(RULES[rule])


# -- the axes of rules -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CLASSES))
def test_a_rules_axes_are_knobs_and_features(name: str) -> None:
    rule = CLASSES[name]
    assert {f"rule.{field}" for field in rule.axes} <= set(KNOBS)
    learned = {"weights"} if "hidden" in rule.needs else set()  # follow from the model
    assert set(rule.axes) == set(rule.model_fields) - {"name"} - learned, "no field is out of reach"
    assert set(rule().features()) == {*rule.feature_names, *rule.axes.values()}
    if name in (UNIFIED.axes["rule"].choice or ()):
        assert {f"rule.{field}" for field in rule.axes} <= set(UNIFIED.axes)


def test_the_unified_space_has_every_knob_but_a_few() -> None:
    few = {"evict", "trigger", "refit", "rule.instruction", "rule.chunk"}
    assert set(KNOBS) - set(UNIFIED.axes) == few
    assert set(CLASSES) - set(UNIFIED.axes["rule"].choice or ()) == {*PROMPTED}
    lacks = {"read again", "instructed", "read at once", "across layers", "refit"}
    assert set(every_name()) - set(names_for(UNIFIED)) == lacks


@pytest.mark.slow
def test_features_tell_all_policies_of_the_unified_space_apart() -> None:
    price, rng, moved = Context(UNIFIED, SETTING).price, random.Random(0), set[str]()
    for _ in range(60):
        here = price(pool.anything(UNIFIED, rng))
        for axis, knobs in pool.neighbours(UNIFIED, here.knobs, rng) if here else ():
            there = price(knobs)
            if here and there and there.fingerprint != here.fingerprint:
                assert there.features != here.features, (axis, knobs)
                moved.add(axis)
    assert len(moved) > 30


# -- draws -----------------------------------------------------------------------------------------

RANGES: dict[str, dict[str, Any]] = {
    "whole": {"int": (0, 12)},
    "stepped": {"int": (1, 16, 4)},
    "whole, log": {"int": (1, 64), "log": True},
    "number": {"float": (0.2, 0.9)},
    "number, log": {"float": (0.01, 10.0), "log": True},
}


@pytest.mark.parametrize("name", list(RANGES))
def test_draws_are_spread_as_optuna_spreads_them(name: str) -> None:
    axis = Axis.model_validate(RANGES[name])
    only = UNIFIED.model_copy(update={"axes": {"x": axis}})
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    rng = random.Random(1)
    theirs = [float(only.suggest(study.ask())["x"]) for _ in range(1500)]
    ours = [float(pool.anything(only, rng)["x"]) for _ in range(1500)]
    assert all(axis.contains(x) for x in ours)
    at = np.quantile(theirs, [0.1, 0.3, 0.5, 0.7, 0.9])
    share = [[np.mean(np.array(xs) <= x * 1.001) for x in at] for xs in (ours, theirs)]
    assert np.abs(np.subtract(*share)).max() < 0.06


@pytest.mark.parametrize("name", list(RANGES))
def test_neighbours_of_a_number_are_near_and_far(name: str) -> None:
    axis = Axis.model_validate(RANGES[name])
    low, high, step = axis.range
    for place in (0.0, 0.4, 1.0):
        here = axis.at(place)
        others = pool.values(axis, here)
        assert all(axis.contains(x) for x in others) and here not in others
        away = sorted(abs(axis.place(x) - axis.place(here)) for x in others)
        one = (
            0.0
            if step is None
            else max(
                abs(axis.place(x) - axis.place(here))
                for x in (min(high, float(here) + step), max(low, float(here) - step))
            )
        )
        assert away[0] <= max(0.1, one) and away[-1] >= 0.5
    assert drawn(0.0, low, high, step, axis.log) == low


def test_a_sampler_says_what_it_cannot_handle() -> None:
    check_space("gp", space.load("default"))
    check_space("kvei", UNIFIED)
    said = f"gp models only axes without conditions, 10 of the {len(UNIFIED.axes)} "
    with pytest.raises(KvsearchError, match=said):
        check_space("gp", UNIFIED)


def test_every_policy_has_a_name_of_its_own_that_says_what_it_is() -> None:
    default, taken = space.load("default"), {*METHODS}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for number in range(300):
        knobs = default.suggest(study.ask())
        name = name_of(knobs, taken, number)
        assert name not in taken
        assert name.split("+")[0].removeprefix("ladder-") in (
            knobs["rule"], knobs["ladder"], "window"
        )  # fmt: skip
        assert knobs["tiers"] == "16" or knobs["tiers"] in name.split("+")
        taken.add(name)
    assert name_of({"rule": "mean", "tiers": "k5v4"}, [], 7) == "mean+k5v4"
    assert name_of({"rule": "mean", "sinks": 4}, ["mean"], 7) == "mean+sinks4"
    assert name_of({"rule": "mean"}, ["mean"], 7) == "mean+no7"
