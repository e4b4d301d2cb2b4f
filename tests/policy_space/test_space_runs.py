"""Any point of the widest space runs: exactly, within its budget, with the bytes it promised."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import shape_of
from kvsearch.policy import Policy, layout
from kvsearch.policy_search.samplers.pool import anything
from kvsearch.policy_space import Setting, build, load
from tests.cache_cases import sharp
from tests.heads import losses
from tests.importance import importance

T, SHORT = 150, 110
IDS = np.random.default_rng(1).integers(0, 97, size=(1, T))
IDS[0, ::9] = 13  # the full stop of `tiny_tokenizer`, so that anchors occur


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = sharp(LlamaForCausalLM(config).double(), 2)
    shape = shape_of(config)
    return LoadedModel(model, tiny_tokenizer, shape, "tiny", "random", "", None, "float64", "cpu")


def drawn(loaded: LoadedModel, count: int) -> list[Policy]:
    shape = loaded.shape
    setting = Setting(
        shape, shape.budget_bytes(56), T, heads=losses(shape), importance=importance(shape)
    )
    space, found, seed = load("unified"), [], 0  # with all that others have
    while len(found) < count:
        seed += 1
        knobs = anything(space, random.Random(seed))
        try:
            if space.forbidden(knobs) is None:
                found.append(build({**knobs, "budget_fraction": 1.0}, setting, name=f"draw {seed}"))
        except PolicyError:  # too small for what it promises to keep
            continue
    return found


@pytest.mark.slow
def test_any_point_runs_exactly_within_its_bytes(loaded: LoadedModel) -> None:
    evaluator = Evaluator(loaded)
    for policy in drawn(loaded, 12):
        found = evaluator.quality(policy, IDS).nll
        sizes = layout(policy, loaded.shape)
        assert sizes.bytes_peak(T) <= loaded.shape.budget_bytes(56), policy
        one_by_one, cache = stepwise(loaded, policy, IDS[:, :SHORT])
        assert np.abs(one_by_one - found[:, : SHORT - 1]).max() < 1e-5, policy.to_json()
        if policy.anchors is None:  # whose bytes depend on the text
            assert cache.bytes_resident == sizes.bytes_at(SHORT), policy.to_json()
