"""Targets: projections, verdicts, artefacts, and the space that follows from the same table."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsearch.errors import KvsearchError, SpaceError
from kvsearch.exporters import (
    TARGETS,
    Job,
    Target,
    artefact,
    find,
    project,
    unknown_options,
    verdicts,
)
from kvsearch.exporters.fields import FIELDS, active, value
from kvsearch.exporters.project import same_rule
from kvsearch.exporters.space import space_of
from kvsearch.exporters.target_space import starts, stepped
from kvsearch.policy import (
    Anchors,
    Budgets,
    Channels,
    ModelShape,
    Policy,
    Tier,
    check,
    layout,
)
from kvsearch.policy_search.samplers.pool import anything
from kvsearch.policy_space import SearchSpace, Setting, build, load
from kvsearch.policy_space.methods import at
from kvsearch.rules import Attention
from kvsearch.serving.vllm.plugin import fits
from tests.heads import losses
from tests.random_policies import offset, policies, policy

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=64, heads=4)
WIDE = ModelShape(layers=4, kv_heads=2, head_dim=128, heads=4)
SMALL = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=4)
targets = pytest.mark.parametrize("name", TARGETS)


def written(p: Policy, target: Target, shape: ModelShape = SHAPE) -> dict[str, str]:
    return dict(artefact(Job(p, shape, "MODEL"), target).files)


@targets
@given(seed=st.integers(0, 1 << 30), shape=st.sampled_from([SHAPE, WIDE, SMALL]))
@settings(max_examples=30, deadline=None)
def test_what_a_target_gives_it_executes(name: str, seed: int, shape: ModelShape) -> None:
    target, asked = find(name), policy(random.Random(seed), shape)
    given = project(asked, target, shape)
    check(given, shape)
    assert project(given, target, shape) == given
    assert {v.verdict for v in verdicts(given, given, 4)} <= {"exact"}
    found = {v.field: v for v in verdicts(asked, given, 4)}
    for field, default in FIELDS.items():
        a, g = value(asked, field), value(given, field)
        assert (field in found) == (a != default or a != g)
        if a != g:
            assert found[field].verdict != "exact"
    if not [v for v in found.values() if v.verdict != "exact"]:
        assert given.canonical(4) == asked.canonical(4)
    for file, text in written(given, target, shape).items():
        _parses(file, text)


@targets
@given(seed=st.integers(0, 1 << 30), known=st.booleans())
@settings(max_examples=10, deadline=None)
def test_figures_stay_with_the_policy_that_was_measured(name: str, seed: int, known: bool) -> None:
    target, shape = find(name), SHAPE if known else None
    origin = {"model": "smollm2-135m", "adapted": {"steps": 8}}
    about = {**origin, "nll": 2.6, "bytes_peak": 5_891_400, "measured": {"ppl": 13.6}, "mine": 4}
    asked = policy(random.Random(seed), SHAPE).model_copy(update={"about": about})
    given = project(asked, target, shape)
    layers = None if shape is None else shape.layers
    same = given.canonical(layers) == asked.canonical(layers)
    assert given.about == (about if same else origin)
    assert project(given, target, shape).about == given.about


def _parses(file: str, text: str) -> None:
    kind = Path(file).suffix
    if kind == ".py":
        compile(text, file, "exec")
    elif kind == ".json":
        json.loads(text)
    elif kind == ".yaml":
        assert isinstance(yaml.safe_load(text), dict)
    else:
        assert (kind == ".sh" and text.startswith("#!/bin/sh\n")) or file == "Modelfile"


@targets
def test_a_projection_keeps_to_what_the_table_says(name: str) -> None:
    """Read from the description itself, not through `project`."""
    target = find(name)
    if (can := target.executes) is None:
        asked = policies(60, SHAPE)
        given = [project(p, target, SHAPE) for p in asked]
        kept = [g is p for p, g in zip(asked, given, strict=True)]
        assert any(kept) and all(kept) == (not target.without)
        assert all(value(g, f) == FIELDS[f] for g in given for f in target.without)
        return
    formats = {(f.key_bits, f.value_bits, f.levels) for f in can.formats}
    seen: Counter[str] = Counter()
    for asked in policies(200, SHAPE, seed=2):
        g, how = project(asked, target, SHAPE), can.eviction
        assert not g.ranks_tiers and g.ladder is None and not (g.quantizes and g.fp16_sinks)
        for (tier,) in g.every_tiers:
            bits = (tier.key_bits, tier.value_bits, g.quantizer.levels)
            assert tier.native or bits in formats
        seen["quantised"] += g.quantizes
        seen["layers"] += g.head_tiers is not None
        if how is None:
            assert not g.evicts
            continue
        if not g.evicts:
            continue
        assert g.slots is not None
        seen["evicts"] += 1
        assert how.slots.fit(g.slots) == g.slots and g.positions in how.positions
        assert g.trigger in how.triggers and (not g.quantizes or how.quantised)
        (ranking,) = [r for r in how.rankings if same_rule(r.rule, g.active_rule)]
        assert (ranking.sinks or how.sinks).fit(g.sinks) == g.sinks
        interval = ranking.interval or how.interval
        if not g.quantizes or how.exact_when_quantised:
            fits = interval(g.slots, g.sinks) if callable(interval) else interval.fit(g.interval)
            assert g.interval == fits
        else:
            assert g.interval == 1
        assert how.budgets or g.budgets.kind == "uniform"
    assert bool(formats) == bool(seen["quantised"])
    assert bool(seen["layers"]) == (can.layers != "alike")
    assert bool(seen["evicts"]) == (can.eviction is not None)


def test_verdicts_tell_what_was_rounded_from_what_is_lost() -> None:
    asked = Policy(
        slots=700, interval=16, sinks=5, recent_window=100, rule=Attention(alpha=1, beta=1),
        tiers=(Tier(key_bits=4, value_bits=4),), anchors=None,
    )  # fmt: skip
    names = ("llamacpp", "openvino", "sglang", "transformers", "vllm")
    found = {n: _words(asked, n) for n in names}
    assert found["llamacpp"] == {
        "slots": "exact", "interval": "approximate", "sinks": "exact", "recent_window": "dropped",
        "rule": "dropped", "tiers": "exact", "quantizer.group": "approximate",
        "quantizer.levels": "approximate",
    }  # fmt: skip
    assert found["openvino"]["sinks"] == found["openvino"]["rule"] == "approximate"
    assert found["openvino"]["tiers"] == "exact"
    assert found["sglang"]["slots"] == found["sglang"]["rule"] == "dropped"
    assert found["sglang"]["tiers"] == "approximate"
    assert {*found["transformers"].values(), *found["vllm"].values()} == {"exact"}
    more = Policy(
        anchors=Anchors(),
        channels=Channels(vo=("all", "none", "all", "all"), qk=("all", "none", "all", "all")),
    )
    assert _words(more, "sglang") == {"anchors": "dropped", "channels": "dropped"}
    assert _words(more, "vllm") == {"anchors": "dropped", "channels": "exact"}
    prompted = Policy(slots=64, trigger="prompt+stream")
    assert _words(prompted, "vllm") == {"slots": "exact", "trigger": "exact"}


def _words(asked: Policy, name: str) -> dict[str, str]:
    return {v.field: v.verdict for v in verdicts(asked, project(asked, find(name), SHAPE), 4)}


def test_idle_fields_are_no_loss() -> None:
    """A recent window without a rule or tiers does nothing, so no runtime can drop it."""
    asked = Policy(slots=64, recent_window=9)
    assert not active(asked, "recent_window")
    assert project(asked, find("llamacpp"), SHAPE) == asked


def test_llamacpp_rotates_values_in_blocks_of_64() -> None:
    q4 = dict(tiers=[dict(key_bits=4, value_bits=4)])
    asked = Policy.build({**q4, "quantizer": dict(group=32, levels="ggml-0", rotate=True)})
    assert project(asked, find("llamacpp"), SHAPE) == asked  # a head is one block
    assert project(asked, find("llamacpp"), WIDE).quantizer.value_block == 64
    odd = ModelShape(layers=4, kv_heads=2, head_dim=96, heads=4)
    assert not project(asked, find("llamacpp"), odd).quantizer.rotate


def test_windows_per_layer_reach_tensorrt_llm() -> None:
    asked = Policy(
        slots=100, budgets=Budgets(kind="sensitivity", weights=(1, 4, 9, 16), exponent=0.5)
    )
    target = find("tensorrt_llm")
    assert project(asked, target, SHAPE) == asked
    config = yaml.safe_load(written(asked, target)["extra-llm-api-options.yaml"])["kv_cache_config"]
    assert sum(config["max_attention_window"]) == 400 and "sink_token_length" not in config
    sinks = asked.model_copy(update={"sinks": 4})
    assert project(sinks, target, SHAPE) == asked  # its PyTorch backend attends without them
    assert config["max_attention_window"] == sorted(set(config["max_attention_window"]))
    for name in ("tensorrt_llm", "mlx"):
        with pytest.raises(KvsearchError, match="name the model with --model"):
            artefact(Job(asked, None, "MODEL"), find(name))


def test_a_rotating_cache_of_mlx_gets_its_prompt_token_by_token() -> None:
    """mlx-lm makes one mask for all layers: of the first one's window, without its sinks."""
    target = find("mlx")
    whole = project(Policy(tiers=(Tier(key_bits=4, value_bits=4),)), target, SHAPE)
    for asked, alone in ((Policy(slots=64, sinks=4), True), (whole, False)):
        assert ("prefill_step_size=1" in written(asked, target)["run.py"]) == alone


def test_executorch_has_positions_for_the_whole_ring() -> None:
    """Its rotary table is as long as its context, by default 128, and its ring two windows."""
    target = find("executorch")
    for slots, call in ((256, 128), (100, 96)):
        made = written(Policy(slots=slots, sinks=4), target)
        config = yaml.safe_load(made["kv-cache.yaml"])
        assert config["model"]["use_attention_sink"] == f"4,{slots - 4}"
        lengths = {"max_seq_length": call, "max_context_length": 4 + 2 * (slots - 4)}
        assert config["export"] == lengths
        assert config["defaults"] == ["llm_config", "_self_"]  # so base.checkpoint=FILE is a key
        assert "python -m executorch.extension.llm.export.export_llm" in made["export.sh"]
    assert "export.max_context_length=" in written(Policy(), target)["export.sh"]


def test_ollama_says_that_a_full_cache_has_a_context() -> None:
    """Of 4096 tokens unless it is told, and then it evicts."""
    full, evicting = (written(p, find("ollama"))["Modelfile"] for p in (Policy(), Policy(slots=64)))
    assert "# PARAMETER num_ctx TOKENS" in full and "4096" in full
    assert "\nPARAMETER num_ctx 64\n" in evicting and "TOKENS" not in evicting


# -- names and values of the runtimes ----------------------------------------------------------


@targets
def test_artefacts_use_no_option_that_the_version_lacks(name: str) -> None:
    """Flags, variables and keys are found in the text itself, beside what the writer reports."""
    target = find(name)
    flags: set[str] = set()
    for asked in policies(100, SHAPE, seed=4):
        made = artefact(Job(project(asked, target, SHAPE), SHAPE, "MODEL"), target)
        assert unknown_options(target, made.options) == []
        text = "\n".join(t for f, t in made.files.items() if f != "policy.json")
        for option, set_to in made.options.items():
            assert option in text or str(set_to) in text, (option, set_to)
        shell = "\n".join(t for f, t in made.files.items() if f.endswith(".sh"))
        flags |= {
            *re.findall(r"(?<!\S)--[a-z_-]+", shell),
            *re.findall(r"\b[A-Z_]{8,}(?==)", shell),
        }
    ours = {"--model", "--extra_options"}
    assert flags - ours <= set(target.options)


def test_a_wrong_option_or_value_is_found() -> None:
    target = find("vllm")
    assert unknown_options(target, {"--kv-cache-dtype": "int4"}) == ["--kv-cache-dtype 'int4'"]
    assert unknown_options(target, {"--kv-dtype": "fp8"}) == ["option --kv-dtype"]
    assert unknown_options(find("ollama"), {"num_ctx": "many"}) == ["num_ctx 'many'"]


# -- the search space --------------------------------------------------------------------------


def executed(target: Target, space: SearchSpace, setting: Setting) -> list[Policy]:
    """Policies of random points of a space; the target runs each as it is."""
    rng, found = random.Random(3), []
    for _ in range(240):
        knobs = anything(space, rng)
        try:
            made = build(knobs, setting)
        except KvsearchError:
            continue
        if not space.forbidden(knobs):
            given = project(made, target, setting.shape)
            assert given.canonical(4) == made.canonical(4), verdicts(made, given, 4)
            assert {v.verdict for v in verdicts(made, given, 4)} <= {"exact"}
            found.append(made)
    return found


@targets
def test_every_point_of_a_targets_space_is_executed_as_it_is(name: str) -> None:
    target, base, shape = find(name), load("default"), WIDE
    setting = Setting(
        shape, shape.budget_bytes(128), 512, heads=losses(shape), offset=offset(shape)
    )
    if name in ("openvino", "kvpress", "ollama"):
        with pytest.raises(SpaceError, match=f"--target {name}: it"):
            space_of(target, shape, base)
        return
    space = space_of(target, shape, base)
    if target.executes is None:
        assert space is base
        return
    built = executed(target, space, setting)
    kinds = {(p.evicts, p.tiers, p.quantizer.levels, p.positions) for p in built}
    how = target.executes.eviction
    wide = how is None or how.quantised
    assert len(built) > 100 and len(kinds) >= (2 if wide else 1)


@targets
def test_every_point_for_prompts_is_executed_as_it_is(name: str) -> None:
    """Of runtimes that evict after a prompt, too; slots of OpenVINO come in blocks."""
    target, base, slots = find(name), load("prompts"), 190
    setting = Setting(
        WIDE, WIDE.budget_bytes(slots), 512, prompt=480, heads=losses(WIDE), offset=offset(WIDE)
    )
    setting = stepped(name, setting)
    if name == "ollama":
        with pytest.raises(SpaceError, match="its interval follows"):
            space_of(target, WIDE, base, on_prompts=True)
        return
    space = space_of(target, WIDE, base, on_prompts=True)
    built = executed(target, space, setting)
    assert len(built) > 40
    for made in (p for p in built if p.evicts):
        assert layout(made, WIDE).bytes_peak(512, 480) <= WIDE.budget_bytes(slots)
    kinds = {(p.trigger, None if p.rule is None else p.rule.name) for p in built}
    if name == "openvino":
        assert kinds == {("prompt+stream", "attention")}
    if name == "kvpress":
        assert {t for t, _ in kinds} == {"prompt", "prompt+stream"} and len(kinds) >= 8
    found = dict(starts(name, space, setting))
    if name in ("openvino", "kvpress"):
        assert len(found) >= (2 if name == "openvino" else 6)
        assert all(space.params(m.knobs) is not None for m in found.values())


@pytest.mark.parametrize(
    ("name", "slots", "names"),
    [
        ("vllm", 129, {"fp8_e4m3", "fp8_e5m2", "int4_per_token_head", "nvfp4"}),
        ("llamacpp", 96, {"window+k8v8", "window+k5v5", "window+k5v4", "window+k4v4"}),
    ],
)
def test_a_search_starts_from_what_the_targets_users_set_by_hand(
    name: str, slots: int, names: set[str]
) -> None:
    """Types of vLLM of which every token of a window fits; else sinks and a window in its types."""
    shape = ModelShape(layers=2, kv_heads=2, head_dim=32, heads=4)
    setting, target = Setting(shape, shape.budget_bytes(slots), 256), find(name)
    found = dict(starts(name, space_of(target, shape, load("default")), setting))
    made = {n: build(method.knobs, setting) for n, method in found.items()}
    assert {*made} == names
    for one, own in made.items():
        assert project(own, target, shape) == own and own.evicts == (name == "llamacpp")
        share = layout(own, shape).bytes_peak(256) / shape.budget_bytes(slots)
        assert share <= 1 and (share > 0.7 or not own.evicts)
        if name == "vllm":
            assert f"--kv-cache-dtype {one}" in written(own, target, shape)["serve.sh"]
    if name == "llamacpp":
        plain = at("streamingllm", setting).slots or 0
        assert (made["window+k5v4"].slots or 0) > 2.5 * plain


def test_a_budget_that_pays_for_no_block_is_one_sentence() -> None:
    setting = stepped("openvino", Setting(WIDE, WIDE.budget_bytes(100), 512, prompt=480))
    space = space_of(find("openvino"), WIDE, load("prompts"), on_prompts=True)
    (_, method), *_ = starts("openvino", space, replace(setting, budget_bytes=1 << 30))
    with pytest.raises(KvsearchError, match=r"pay for 9\d slots, .* 128 or more, a multiple of 32"):
        build(method.knobs, setting)


@targets
def test_layers_differ_only_in_files_that_can_say_which(name: str) -> None:
    """Of a model with sliding-window layers; what `run --target` finds has to be exported."""
    shape = ModelShape(layers=2, kv_heads=1, head_dim=64, heads=4, others=4)
    target, base = find(name), load("default")
    if name in ("openvino", "kvpress", "ollama", "vllm"):
        with pytest.raises(SpaceError, match="does not serve" if name == "vllm" else "it"):
            space_of(target, shape, base)
        return
    space = space_of(target, shape, base)
    assert space is base if name == "transformers" else "budgets" not in space.axes


def test_a_published_method_is_a_point_of_llamacpps_space() -> None:
    space = space_of(find("llamacpp"), SHAPE, load("default"))
    assert space.params({"sinks": 4, "positions": "cache"}) is not None
    setting = Setting(SHAPE, SHAPE.budget_bytes(128), 512)
    method = at("streamingllm", setting)
    assert project(method, find("llamacpp"), SHAPE).canonical(4) == method.canonical(4)


@targets
def test_a_level_of_proof_rests_on_a_kept_study(name: str) -> None:
    """`nll`: every record agrees, on so many tokens; `runs`: it generated, or told losses.

    vLLM has records of several versions. Requests in it are fewer tokens: means within 1e-3 nats in
    16 bits, 5e-3 below. Of a policy that waits for the prompt's end they are the generated ones, so
    few that 5e-3 is less than their mean is known to in 4 bits: there the interval has 0.
    """
    target = find(name)
    if target.environment is None:
        assert target.proof == "schema" or target.score is not None
        return
    folder = Path(__file__).parents[2] / "studies" / f"2026-11-{name}" / "records"
    records = [json.loads(f.read_text(encoding="utf-8")) for f in folder.rglob("*.json")]
    versions = {r["version"] for r in records}
    assert (target.proof != "schema") == bool(records)
    assert name == "vllm" or versions <= {target.version}
    if name == "vllm":
        assert target.version in versions and all(map(fits, versions))
        assert all(sum(r["version"] == v for r in records) == 11 for v in versions)
        for r in records:
            few, off = r["losses_of"] == "generated tokens", r["loss"]["off"]
            assert len(r["requests"]) == 2 and r["loss"]["tokens"] >= (64 if few else 498)
            quantised = Policy.build(r["policy"]).quantizes
            if few and quantised:
                assert off["lo"] <= 0 <= off["hi"]
            else:
                assert abs(off["mean"]) <= (0.005 if quantised else 0.001)
    elif target.proof == "nll":
        least = 512 if name == "kvpress" else 4096  # several short windows, or one long one
        assert all(r["loss"]["agrees"] and r["loss"]["tokens"] >= least for r in records)
    else:
        assert all(r["loss"]["runtime"] or r["measured"]["generated"] for r in records)


def test_docs_list_what_the_table_says() -> None:
    from kvsearch.exporters.table import markdown

    page = Path(__file__).parents[2] / "docs" / "targets.md"
    text = page.read_text(encoding="utf-8")
    (table,) = re.findall(r"<!-- table -->\n(.*?)<!-- end -->", text, re.S)
    assert table == markdown(), "run: python -m kvsearch.exporters.table docs/targets.md"
