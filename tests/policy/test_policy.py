"""The policy type: identity, files, bytes, and what it refuses."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvsearch.errors import PolicyError
from kvsearch.policy import (
    Anchors,
    Budgets,
    Channels,
    HeadTiers,
    Ladder,
    ModelShape,
    Policy,
    Quantizer,
    Tier,
    check,
    layout,
    offset,
    rungs,
)
from kvsearch.policy import layer_bytes as cost
from kvsearch.policy.layout import costs_of, peak_of
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.rules import RULES, Attention
from kvsearch_kernels.codebooks import CODEBOOKS
from tests.random_policies import policies as random_policies

SHAPE = ModelShape(layers=6, kv_heads=2, head_dim=16, heads=4)
GOLDEN = Path(__file__).parents[1] / "golden" / "policies"


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    interval = draw(st.sampled_from([1, 2, 5, 8]))
    levels = draw(st.sampled_from([n for n, book in CODEBOOKS.items() if book.group is None]))
    bits = st.sampled_from([16, *CODEBOOKS[levels].bits])
    high, low = sorted([draw(bits), draw(bits)], reverse=True)
    share = draw(st.sampled_from([1.0, 0.3]))
    tiers = [Tier(share=share, key_bits=high, value_bits=high)]
    if share < 1:
        tiers.append(Tier(share=1 - share, key_bits=low, value_bits=low))
    score = draw(st.sampled_from([None, Attention(), Attention(alpha=1, beta=1, horizon=interval)]))
    slots = draw(st.none() | st.integers(40, 70))
    ladders = [None, Ladder(span=0.25, overlap=0.5), Ladder(span=0.5, overlap=0.5)]
    weights = (1.0, 2.0, 0.1, 5.0, 1.0, 1.0)
    return Policy(
        slots=slots,
        ladder=draw(st.sampled_from(ladders)) if slots else None,
        interval=interval,
        sinks=draw(st.integers(0, 4)),
        recent_window=draw(st.integers(0, 12)),
        rule=score,
        tiers=tuple(tiers),
        quantizer=Quantizer(
            group=draw(st.sampled_from([2, 8, 16, None])),
            levels=levels,
            fp16_sinks=draw(st.booleans()),
        ),
        budgets=draw(
            st.sampled_from(
                [
                    Budgets(),
                    Budgets(kind="pyramid", beta=2),
                    Budgets(kind="sensitivity", weights=weights),
                ]
            )
        ),
    )


def test_the_schema_takes_every_policy_and_tells_rules_by_their_names() -> None:
    schema = Policy.model_json_schema()
    Draft202012Validator.check_schema(schema)
    found = Draft202012Validator(schema)
    for policy in [
        *random_policies(40, SHAPE),
        *(Policy(slots=64, rule=rule(), trigger="prompt") for rule in RULES.values()),
        Policy(anchors=Anchors(at=7, protected=(0, 3))),
        Policy(channels=Channels(qk=("none", "f 3"), vo=("none", "all")), about={"nll": 1.5}),
    ]:
        text = policy.to_json()
        for written in (text, policy.model_dump_json(by_alias=True)):  # with defaults, too
            assert not [e.message for e in found.iter_errors(json.loads(written))], written
        again = Policy.parse(text)
        assert again == policy and again.fingerprint(6) == policy.fingerprint(6)
    assert Policy.parse('{"name": "\\ud83d\\ude00"}').name == "\U0001f600"  # two halves are a whole
    for rule, valid in (
        ({}, True),  # the rule `attention`, as in earlier files
        ({"alpha": 1}, True),
        ({"lag": 64}, False),
        ({"name": "lagkv", "lag": 64}, True),
        ({"name": "lagkv", "alpha": 1}, False),
        ({"name": "h20"}, False),
    ):
        assert found.is_valid({"rule": rule}) is valid, rule
        if not valid:
            with pytest.raises(PolicyError, match="field rule"):
                Policy.build({"rule": rule})


@settings(max_examples=150, deadline=None)
@given(policies(), st.integers(1, 160))
def test_bytes_peak_is_the_largest_step_and_never_exceeds_the_endless_peak(
    policy: Policy, tokens: int
) -> None:
    sizes = layout(policy, SHAPE)
    steps, after = [], []
    for seen in range(1, tokens + 1):
        before = 0  # bytes while the step's token attends, before its compaction
        for layer in sizes.layers:
            *_, (compacted, residual) = layer.intervals(seen)
            before += layer.bytes(compacted, residual)
            assert policy.slots is None or compacted + residual <= (layer.slots or 0)
        steps.append(before)
        after.append(sizes.bytes_at(seen))
    assert sizes.bytes_peak(tokens) == max(steps + after)
    assert sizes.bytes_mean(tokens) == pytest.approx(sum(steps) / tokens)
    if policy.slots is not None:
        assert max(steps + after) <= sizes.bytes_peak()


@settings(max_examples=100, deadline=None)
@given(policies(), st.integers(1, 160))
def test_a_loop_and_arrays_find_the_same_peak(policy: Policy, tokens: int) -> None:
    found = []
    for few in (0, 10**6):
        with mock.patch.object(cost, "FEW", few):
            found.append(peak_of(policy, SHAPE, costs_of(policy, SHAPE), tokens))
    assert found[0] == found[1] == layout(policy, SHAPE).bytes_peak(tokens)


@pytest.mark.parametrize("trigger", ["stream", "prompt+stream", "generation"])
def test_costs_of_another_size_give_the_same_peak(trigger: str) -> None:
    policy = Policy.build(
        {"slots": 40, "sinks": 4, "recent_window": 8, "interval": 4, "trigger": trigger}
    )
    other = policy.model_copy(update={"slots": 60, "recent_window": 2})
    found = peak_of(policy, SHAPE, costs_of(other, SHAPE), 160, 20)
    assert found == layout(policy, SHAPE).bytes_peak(160, 20)
    assert found < layout(other, SHAPE).bytes_peak(160, 20)


def test_full_cache_bytes_are_two_bytes_a_channel() -> None:
    sizes = layout(Policy(), SHAPE)
    assert sizes.bytes_peak(100) == 100 * 2 * 2 * 2 * 16 * 6 == SHAPE.budget_bytes(100)


@pytest.mark.parametrize(
    ("shares", "payload"),
    [([(0.2, 4), (0.8, 1)], 0.1), ([(0.6, 4), (0.4, 2)], 0.2), ([(0.6, 8), (0.4, 4)], 0.4)],
)
@pytest.mark.parametrize("group", [32, 64])
def test_table_1_of_xmu_costs_what_its_arithmetic_says_plus_scales(
    shares: list[tuple[float, int]], payload: float, group: int
) -> None:
    shape = ModelShape(layers=1, kv_heads=1, head_dim=64, heads=1)
    tiers = tuple(Tier(share=s, key_bits=b, value_bits=b) for s, b in shares)
    policy = Policy(interval=1000, tiers=tiers, quantizer=Quantizer(group=group))
    ratio = layout(policy, shape).bytes_at(1000) / shape.budget_bytes(1000)
    assert ratio == pytest.approx(payload + 32 / group / 16, abs=1e-3)


def test_slots_are_shared_out_exactly_and_never_below_the_floor() -> None:
    policy = Policy(slots=40, sinks=4, recent_window=8, budgets=Budgets(kind="pyramid", beta=20))
    slots = [layer.slots or 0 for layer in layout(policy, SHAPE).layers]
    assert sum(slots) == 40 * 6
    assert slots == sorted(slots, reverse=True) and min(slots) >= 13


def test_inactive_fields_do_not_change_the_identity() -> None:
    assert (
        Policy(recent_window=7, positions="cache", interval=9).fingerprint()
        == Policy().fingerprint()
    )
    a = Policy(slots=60, quantizer=Quantizer(group=8), recent_window=5)
    assert a.fingerprint() == Policy(slots=60).fingerprint()
    uneven = Policy(slots=60, budgets=Budgets(kind="pyramid"))  # no layer has less than a window
    assert uneven.fingerprint() != uneven.model_copy(update={"recent_window": 40}).fingerprint()
    seven = Policy(slots=60, ladder=Ladder(span=7 / 30, overlap=3 / 7))
    eight = Policy(slots=60, ladder=Ladder(span=8 / 30, overlap=0.5))
    assert seven.fingerprint(30) == eight.fingerprint(30)
    assert seven.fingerprint(32) != Policy(slots=60).fingerprint(32)


@given(policies(), st.sampled_from(["recent_window", "sinks", "interval"]), st.integers(0, 60))
def test_one_identity_has_one_layout(policy: Policy, field: str, value: int) -> None:
    """A search takes the figures of one for those of the other."""
    try:
        other = Policy.build(json.loads(policy.to_json()) | {field: value})
        slots = [[x.slots for x in layout(p, SHAPE).layers] for p in (policy, other)]
    except PolicyError:
        return
    if policy.fingerprint(SHAPE.layers) == other.fingerprint(SHAPE.layers):
        assert slots[0] == slots[1]


def test_levels_that_do_not_read_a_field_do_not_hash_it() -> None:
    tiers = (Tier(key_bits=8, value_bits=8),)

    def fingerprint(**fields: Any) -> str:
        return Policy(tiers=tiers, quantizer=Quantizer(**fields)).fingerprint()

    assert fingerprint(levels="e4m3") == fingerprint(levels="e4m3", group=8)
    assert fingerprint(levels="e4m3") != fingerprint(levels="e5m2")
    assert fingerprint() == fingerprint(value_block=8) == fingerprint(value_levels="uniform")
    assert fingerprint() != fingerprint(value_levels="lloyd")
    assert fingerprint(levels="e4m3", value_levels="lloyd") != fingerprint(levels="e4m3")
    turned = {fingerprint(rotate=True, value_block=b) for b in (None, 1, 8, 16)}
    assert len(turned) == 4


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        *(("q8_0", 8.5), ("q5_1", 6), ("q5_0", 5.5), ("q4_1", 5), ("q4_0", 4.5), ("fp8-e4m3", 8)),
        ("nvfp4", 4.5),
    ],
)
def test_formats_of_other_engines_cost_the_bits_that_those_state(method: str, bits: float) -> None:
    shape = ModelShape(layers=2, kv_heads=3, head_dim=96, heads=6)
    policy = at(method, Setting(shape, None, 100))
    assert 16 * layout(policy, shape).bytes_at(100) == bits * shape.budget_bytes(100)
    check(policy, shape)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(
    ("method", "parts"),  # of a key and of a value: bits of a number, and bytes beside them
    [
        ("int8_per_token_head", ((8, 4), (8, 4))),  # scales in fp32
        ("fp8_per_token_head", ((8, 4), (8, 4))),
        ("int4_per_token_head", ((4, 4), (4, 4))),
        ("turboquant_k8v4", ((8, 0), (4, 4))),  # keys: a length; values: step and zero in fp16
        ("turboquant_4bit_nc", ((4, 2), (4, 4))),
        ("turboquant_k3v4_nc", ((3, 2), (4, 4))),
        ("turboquant_3bit_nc", ((3, 2), (3, 4))),
    ],
)
def test_formats_of_vllm_cost_the_bytes_of_its_slots(
    method: str, parts: tuple[tuple[int, int], ...], D: int
) -> None:
    shape = ModelShape(layers=2, kv_heads=3, head_dim=D, heads=6)
    policy = at(method, Setting(shape, None, 100))
    slot = sum(D * bits // 8 + more for bits, more in parts)
    assert slot % 2 == 0  # what vLLM pads TurboQuant's to
    assert layout(policy, shape).bytes_at(100) == 100 * 2 * 3 * slot
    check(policy, shape)


def test_rungs_match_the_papers_rule() -> None:
    r = rungs(32, 0.25, 0.5)
    assert (r.B, r.A, r.R) == (7, 2, 5)
    kept = [{offset(i, r, "contiguous") + a for a in range(r.A)} for i in range(32)]
    assert [sum(rung in k for k in kept) for rung in range(7)] == [8, 12, 8, 8, 8, 12, 8]
    modular = [{offset(i, r, "modular") + a for a in range(r.A)} for i in range(32)]
    assert [sum(rung in k for k in modular) for rung in range(7)] == [6, 12, 11, 10, 10, 10, 5]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON (line 1"),
        ("[]", "expected one JSON object"),
        ('{"slots": "many"}', "field slots"),
        ('{"slotz": 3}', "field slotz"),
        ('{"tiers": [{"key_bits": 6}]}', "field tiers.0.key_bits"),
        (
            '{"tiers": [{"value_bits": 4}], "quantizer": {"levels": "e4m3"}}',
            "field tiers.0.value_bits: levels 'e4m3' know 8 bits, got 4",
        ),
        (
            '{"tiers": [{"key_bits": 5}], "quantizer": {"levels": "ggml-0"}}',
            "field quantizer.group: levels 'ggml-0' have groups of 32, got 64",
        ),
        (
            '{"tiers": [{"key_bits": 8}], "quantizer": {"levels": "e5m2", "along": "tokens"}}',
            "field quantizer.along: levels 'e5m2' have no groups along tokens",
        ),
        (
            '{"tiers": [{"key_bits": 8, "value_bits": 8}], '
            '"quantizer": {"levels": "e4m3", "value_levels": "turboquant-v"}}',
            "field tiers.0.value_bits: value_levels 'turboquant-v' know 4, 3 bits, got 8",
        ),
        (
            '{"tiers": [{"key_bits": 4}], "quantizer": {"value_levels": "nvfp4"}}',
            "field quantizer.group: value_levels 'nvfp4' have groups of 32, got 64",
        ),
        ('{"quantizer": {"value_block": 48}}', "field quantizer.value_block: must be a power of"),
        (
            '{"quantizer": {"offset": {"keys": ["AADA"], "sample": ""}}}',
            "field quantizer.offset.keys.0: an offset is base64 of float16 numbers, got 'AADA'",
        ),
        (
            '{"quantizer": {"offset": {"keys": ["AHw="], "sample": ""}}}',
            "field quantizer.offset.keys.0: an offset has a number that is not finite",
        ),
        (
            '{"quantizer": {"offset": {"keys": ["ADw="], "scales": ["AAA="], "sample": ""}}}',
            "field quantizer.offset.scales.0: a scale must be above 0",
        ),
        (
            '{"slots": 9, "positions": "cache", "tiers": [{"key_bits": 4}], '
            '"quantizer": {"offset": {"keys": ["AAA="], "sample": ""}}}',
            "field quantizer.offset: it goes with positions 'original'",
        ),
        ('{"tiers": [{"share": 0.5}]}', "p.json: field tiers: shares must add up to 1"),
        ('{"tiers": {}}', "field tiers: expected a list"),
        ('{"budgets": null}', "field budgets: expected an object, got None"),
        ('{"ladder": {}}', "field ladder.span: is missing"),
        ('{"": 1}', "field '': there is no such field"),
        ('{"rule": {"pool": 2}}', "field rule: pool must be odd"),
        ('{"rule": {"alhpa": 2}}', "field rule.alhpa: there is no such field"),
        ('{"head_tiers": {"others": [[{}]], "of": [2]}}', "field head_tiers.of: 2 is not one of 0"),
        (
            '{"slots": 64, "budgets": {"kind": "sensitivity", "weights": [1, "x", 2]}}',
            "field budgets.weights.1: Input should be a valid number",
        ),
        (
            '{"head_tiers": {"others": [[{"share": 0.5, "key_bits": 4}]], "of": [1, 0]}}',
            "field head_tiers.others.0: shares must add up to 1",
        ),
        ('{"ladder": {"span": 0.5}}', "ladder needs slots"),
        # what Python reads as a number or takes for one, and what nothing can be made of
        ('{"quantizer": {"rotate": 1}}', "field quantizer.rotate: expected true or false, got 1"),
        ('{"quantizer": {"rotate": "true"}}', "field quantizer.rotate: expected true or false"),
        ('{"tiers": [{"key_bits": true}]}', "field tiers.0.key_bits: expected a number, got True"),
        ('{"anchors": {"at": "3"}}', "field anchors.at: expected a number, got '3'"),
        ('{"anchors": {"protected": [0, "4"]}}', "field anchors.protected: expected a number"),
        ('{"head_tiers": {"others": [[{}]], "of": [[]]}}', "a layer names no list of tiers"),
        ('{"schema_": "kvsearch.policy/2"}', "field schema_"),
        ('{"rule": {"name": []}}', "field rule.name: unknown rule []"),
        ('{"rule": {"pool": 999999}}', "field rule.pool"),
        (f'{{"slots": {10**19}}}', "field slots: whole numbers go to 2^60"),
        (f'{{"anchors": {{"protected": [0, {10**400}]}}}}', "field anchors.protected: whole numb"),
        ('{"name": "\\ud800"}', "half of a character"),
        ("[" * 10_000, "nested too deeply"),
        ('{"slots\\n\\nTraceback": 4}', "field slots Traceback: there is no such field"),
        ('{"about": {"a": ["\\ud83d"]}}', "half of a character"),
        ('{"slots": 1' + "0" * 5000 + "}", "a number has too many digits"),
        (
            '{"budgets": {"kind": "sensitivity", "exponent": 2, "weights": [1, 1e200]}}',
            "weights must be between 1e-100 and 1e+100",
        ),
    ],
)
def test_a_wrong_file_names_the_field(text: str, part: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(text)
    with pytest.raises(PolicyError, match=r"p\.json") as error:
        Policy.from_json(file)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_another_shape_is_refused() -> None:
    policy = Policy(slots=50, budgets=Budgets(kind="sensitivity", weights=(1.0, 2.0)))
    with pytest.raises(PolicyError, match="2 layers for a model with 6"):
        check(policy, SHAPE)
    ragged = Budgets(kind="sensitivity", weights=((1.0,) * 3,) * 6)
    with pytest.raises(PolicyError, match=r"budgets.weights: 3 heads in layer 0 of a model with 2"):
        check(Policy(slots=50, budgets=ragged), SHAPE)
    bits = HeadTiers(others=((Tier(key_bits=4, value_bits=4),),), of=(0, 1))
    with pytest.raises(PolicyError, match=r"head_tiers.of: 2 layers for a model with 6"):
        check(Policy(head_tiers=bits, quantizer=Quantizer(group=16)), SHAPE)
    with pytest.raises(PolicyError, match="does not divide the head size 16"):
        check(Policy(tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=64)), SHAPE)
    blocks = Policy(
        tiers=(Tier(key_bits=4, value_bits=5),), quantizer=Quantizer(levels="ggml-0", group=32)
    )
    with pytest.raises(PolicyError, match=r"quantizer.group: 32 does not divide the head size 16"):
        check(blocks, SHAPE)
    with pytest.raises(PolicyError, match="fewer than the 13"):
        check(Policy(slots=12, sinks=4, recent_window=8), SHAPE)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.json")), ids=lambda p: p.stem)
def test_golden_files_load_for_ever(file: Path) -> None:
    known = json.loads((GOLDEN / "fingerprints.txt").read_text())
    assert Policy.from_json(file).fingerprint(30) == known[file.stem]


def test_there_are_golden_files() -> None:
    assert len(list(GOLDEN.glob("*.json"))) >= 5


def test_slots_that_are_all_floor_are_still_shared_out() -> None:
    weights = (1.0, 50.0, 1.0, 1.0, 1.0, 1.0)
    budgets = Budgets(kind="sensitivity", exponent=1.0, weights=weights)
    policy = Policy(slots=13, sinks=4, recent_window=8, budgets=budgets)
    assert [layer.slots for layer in layout(policy, SHAPE).layers] == [13] * 6
