"""Keys that are stored without what they have in common: measured, exact, and refused elsewhere."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvsearch.cache import PolicyCache
from kvsearch.errors import ModelError, PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.exporters import find
from kvsearch.exporters.fields import verdicts
from kvsearch.exporters.project import project
from kvsearch.model_analysis import key_offsets
from kvsearch.models.load import LoadedModel
from kvsearch.models.sample import sample
from kvsearch.models.shape import shape_of
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Offset, Policy, Quantizer, Tier
from kvsearch.policy.key_offset import numbers, word
from kvsearch.policy_space import build
from kvsearch.policy_space import load as load_space
from kvsearch.policy_space.portfolio import DEFAULT, inside, load
from kvsearch.run.run import Run
from kvsearch.session.key_offsets import without_offset
from kvsearch.session.progress import Shown
from kvsearch.vectors import kit
from tests.cache_cases import IDS, K4, OFFSET, SETTING, T, sharp, tiny
from tests.families import BASE, GEMMA2

SLOW = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])  # pairs of channels that turn slowly


@pytest.fixture(scope="module")
def biased() -> LoadedModel:
    """A model whose keys are mostly their projection's bias, as those of Qwen2."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512,
        head_dim=16, rope_parameters=dict(rope_type="default", rope_theta=1e6),
    )  # fmt: skip
    model = sharp(Qwen2ForCausalLM(config).double())
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data = (40 * torch.randn(4, 8).double() * SLOW).flatten()
    return LoadedModel(model, None, shape_of(config), "biased", "", "", None, "float64", "cpu")


def measured(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> key_offsets.KeyMeans:
    text = SimpleNamespace(ids=np.random.default_rng(3).integers(0, 97, 300))
    monkeypatch.setattr(key_offsets, "recall_texts", lambda *_: [text])
    return key_offsets.measure(Evaluator(loaded))


def test_low_bits_collapse_on_keys_with_a_large_bias_and_not_without_it(
    biased: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mean is measured on other tokens, and turned as the bias is; probed, and counted."""
    means = measured(biased, monkeypatch)
    bias = biased.model.model.layers[1].self_attn.k_proj.bias.view(2, 16)
    held = torch.tensor(numbers(means.before[1]))
    assert (held.view(2, 16) - bias).abs().max() < 0.2 * bias.abs().max()
    assert means.large
    tiny_means = measured(tiny(layers=2), monkeypatch)
    assert not tiny_means.large and tiny_means.sample != means.sample
    full, lost = Evaluator(biased).quality(Policy(), IDS).nll, []
    for given in (None, means.offset(biased.model, T)):
        quantizer = Quantizer(group=None, rotate=True, levels="lloyd", offset=given)
        policy = Policy(tiers=(Tier(key_bits=4),), quantizer=quantizer)
        lost.append(float(np.abs(Evaluator(biased).quality(policy, IDS).nll - full).mean()))
    assert lost[1] < 0.2 * lost[0], lost


def test_a_mean_over_positions_is_that_of_the_turned_vectors(biased: LoadedModel) -> None:
    mean = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float16)
    ones = (word(np.ones(32)),) * 2
    means = key_offsets.KeyMeans(2, (word(mean),) * 2, ones, ones, ((0.9, 0.9),) * 2, "")
    found = means.offset(biased.model, 700).heads(0, 2)[:, 0]
    keys = torch.tensor(mean.astype(np.float64))[None, :, None].expand(1, 2, 700, 16)
    cos, sin = biased.model.model.rotary_emb(keys, torch.arange(700)[None])
    half = torch.cat([-keys[..., 8:], keys[..., :8]], -1)
    turned = keys * cos[:, None].double() + half * sin[:, None].double()
    assert np.abs(turned.mean(2)[0].numpy() - found).max() < 2e-3


def with_offset(**fields: Any) -> Policy:
    return Policy(tiers=K4, quantizer=Quantizer(group=8, offset=OFFSET), **fields)


def test_it_is_refused_for_other_weights_another_shape_and_bounded_scores() -> None:
    here, there = tiny(layers=4).model, tiny(seed=1, layers=4).model
    mine = sample(here)
    assert mine is not None
    offset = OFFSET.model_copy(update={"sample": word(mine)})
    policy = Policy(tiers=K4, quantizer=Quantizer(group=8, offset=offset))
    PolicyCache(policy, here.float())  # of another type
    with pytest.raises(PolicyError, match="measured on other weights than this model's; search"):
        PolicyCache(policy, there)
    with pytest.raises(PolicyError, match=r"offset\.keys: 4 layers for a model with 2"):
        PolicyCache(with_offset(), tiny(layers=2).model)
    with pytest.raises(PolicyError, match="32 numbers in layer 0 of a model whose keys have 64"):
        PolicyCache(with_offset(), tiny(layers=4, head_dim=32).model)
    gemma = Gemma2ForCausalLM(Gemma2Config(**{**BASE, **GEMMA2}))
    words = Offset(keys=(word(np.ones(32)),) * 2, sample="")
    policy = Policy(tiers=K4, quantizer=Quantizer(group=8, offset=words))
    with pytest.raises(ModelError, match="bounds its attention scores"):
        PolicyCache(policy, gemma)


def test_a_cache_made_in_inference_mode_serves_training() -> None:
    model = tiny().model.requires_grad_()
    with torch.inference_mode():
        cache = PolicyCache(with_offset(), model, packed=False)
    model(torch.from_numpy(IDS[:1]), past_key_values=cache).logits.sum().backward()
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    assert grad is not None and bool(grad.any())


def test_a_policy_in_16_bits_has_none() -> None:
    plain = Policy(slots=40, quantizer=Quantizer(offset=OFFSET))
    assert plain.offset is None
    assert plain.fingerprint() == Policy(slots=40).fingerprint()
    assert (
        with_offset().fingerprint() != Policy(tiers=K4, quantizer=Quantizer(group=8)).fingerprint()
    )
    assert Policy.parse(with_offset().to_json()) == with_offset()


def test_knobs_take_what_was_measured_and_starting_points_do_where_it_is_large() -> None:
    knobs: dict[str, Any] = dict(rule="h2o", interval=8, tiers="k4v4", group=16, offset="keys")
    with pytest.raises(PolicyError, match="it needs the model's keys to be measured"):
        build(knobs, SETTING)
    setting = replace(SETTING, offset=OFFSET)
    plain = build(knobs, setting).offset
    assert plain is not None and (plain.keys, plain.scales) == (OFFSET.keys, ())
    assert build({**knobs, "offset": "scaled"}, setting).offset == OFFSET
    assert build({**knobs, "tiers": "16"}, setting).quantizer.offset is None
    assert build({**knobs, "offset": "none"}, setting).offset is None
    for name in ("default", "prompts"):
        space = load_space(name)
        points = inside(load(DEFAULT), space)
        assert points and all(
            m.knobs["offset"] == "scaled" for _, m in without_offset(points, space)
        )
        narrow = space.model_copy(
            update={"axes": {k: v for k, v in space.axes.items() if k != "offset"}}
        )
        assert without_offset(points, narrow) == points


@pytest.mark.parametrize("large", [False, True])
def test_a_run_begins_with_offsets_where_the_models_keys_call_for_them(
    large: bool, tiny_folder: Path, prose: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    if large:
        config = Qwen2Config(
            vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            rope_parameters=dict(rope_type="default", rope_theta=1e8),
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.data = 40 * SLOW[::2].float().tile(4)
        model.save_pretrained(folder)
    options = RunConfig(
        model=str(folder), budget_slots=96, text=(str(prose),), context=256, windows=1, trials=1,
        out=tmp_path / "run",
    )  # fmt: skip
    run = Run(options, Shown(quiet=True))
    run.folder.close()
    setting = run._with_offset(run.setting)
    assert setting.offset is not None and run.portfolio
    found = {method.knobs.get("offset") for _, method in run.portfolio}
    assert found == ({"scaled"} if large else {None})


def test_exports_say_who_has_it() -> None:
    policy = with_offset(slots=40)
    for name, word_ in (
        ("transformers", "exact"), ("vllm", "exact"), ("llamacpp", "dropped"), ("mlx", "dropped"),
    ):  # fmt: skip
        given = project(policy, find(name))
        found = {v.field: v.verdict for v in verdicts(policy, given)}
        assert found["quantizer.offset"] == word_, name
    with pytest.raises(PolicyError, match="offsets of keys belong to a certain text or model"):
        kit(policy)
