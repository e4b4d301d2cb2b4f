"""What heads lose: estimated from gradients, measured where it matters, and read by budgets."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import head_losses
from kvsearch.model_analysis.price_by_gradient import price
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import HeadLosses, ModelShape, Policy, Quantizer, layout
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import at

T = 160
IDS = np.random.default_rng(0).integers(0, 256, T)


@pytest.fixture
def tiny(tiny_folder) -> LoadedModel:
    loaded = load_model(str(tiny_folder), device="cpu")
    with torch.no_grad():
        for weight in loaded.model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)  # a flat random model attends to everything alike
        # head 1 of layer 1 gives nothing, whatever it forgets
        loaded.model.model.layers[1].self_attn.v_proj.weight[8:] = 0
    return loaded


def test_an_estimate_is_the_divergence_of_small_changes(tiny) -> None:
    """8-bit keys in one head change little: there half of the squared change is the divergence."""
    evaluator, quantizer = Evaluator(tiny), Quantizer(group=8)
    found = price(
        evaluator, IDS, sizes=(16, 80), quantizer=quantizer, first=T - T // 4, bits=(4,), draws=64
    )
    assert found.slots.shape == (2, 2, 2) and found.keys.shape == (2, 2, 1)
    assert not found.slots[1, 1].any() and (np.delete(found.slots.reshape(4, 2), 3, 0) > 0).all()
    head = dict(others=[[dict(key_bits=4, value_bits=16)]], of=[[1, 0], [0, 0]])
    policy = Policy.build(dict(head_tiers=head, quantizer=quantizer.model_dump()))
    lost = evaluator.divergence(IDS[None]).of(policy)[:, -T // 4 :].mean()
    assert found.keys[0, 0, 0] == pytest.approx(float(lost), rel=0.35)


def test_heads_are_compared_where_the_text_returns(tiny) -> None:
    """A loss before `first` does not count, and the file holds what was measured."""
    evaluator, steps = Evaluator(tiny), list[int]()
    texts = [head_losses.Recall(IDS, 120)] * 2
    found = head_losses.measure(evaluator, texts, lambda: steps.append(1))
    assert len(steps) == 4 and found.starved in found.sizes
    late = price(evaluator, IDS, sizes=found.sizes, quantizer=Quantizer(group=8), first=120)
    early = price(evaluator, IDS, sizes=found.sizes, quantizer=Quantizer(group=8))
    np.testing.assert_allclose(found.slots, late.slots.reshape(4, -1), rtol=1e-3)
    at = found.sizes.index(found.starved)
    assert not np.allclose(late.slots[..., at], early.slots[..., at], rtol=0.05)
    again = HeadLosses.read(json.loads(json.dumps(found.plain())))
    np.testing.assert_allclose(again.sensitivity, found.sensitivity, rtol=2e-3)  # four digits
    np.testing.assert_allclose(np.mean(found.of_layers), 1, rtol=1e-3)
    assert found.of_layers[0] > found.of_layers[1]


def test_the_text_returns_what_it_said_and_is_cut_to_the_models_positions(tiny) -> None:
    tiny.model.config.max_position_embeddings = 8192
    prose, _ = texts = head_losses.recall_texts(tiny)
    facts = (("3096", "Isolde Marchetti", "KX-5582-T", "Count"), ("7431", "E2091", "21 days"))
    for text, mine in zip(texts, facts, strict=True):
        said, again = (tiny.tokenizer.decode(x) for x in np.split(text.ids, [text.first]))
        assert all(fact in said and fact in again for fact in mine)
    tiny.model.config.max_position_embeddings = 1000
    short, _ = head_losses.recall_texts(tiny)
    assert (short.ids == prose.ids[-1000:]).all() and 0 <= short.first < prose.first
    assert len(head_losses.recall_texts(tiny, 128)[1].ids) == 128


SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=16, heads=4)
LOSSES = HeadLosses(
    heads=2, sizes=(8, 32), slots=((4, 1), (2, 1), (1, 0.5), (0.1, 0)), bits=(8, 4, 2),
    keys=((0, 1, 9), (0, 1, 2), (0, 0.1, 0.2), (0, 0, 0)),
    values=((0, 1, 2), (0, 1, 2), (0, 0.1, 0.2), (0, 0, 0)), starved=8,
)  # fmt: skip
SETTING = Setting(SHAPE, SHAPE.budget_bytes(64), 512, heads=LOSSES)


@pytest.mark.parametrize("budgets", ["heads", "marginal"])
def test_budgets_of_heads_fill_the_bytes_and_follow_the_losses(budgets: str) -> None:
    policy = build(dict(budgets=budgets, sinks=2), SETTING)
    slots = layout(policy, SHAPE).slots
    assert slots[0] >= slots[1] >= slots[2] >= slots[3] < slots[0]
    held = layout(policy, SHAPE).bytes_peak(512)
    assert 0.98 * SHAPE.budget_bytes(64) < held <= SHAPE.budget_bytes(64)


@pytest.mark.parametrize(("slots", "full"), [(64, 0), (130, 0), (190, 1), (300, 2), (380, 2)])
def test_heads_that_retrieve_keep_everything_and_the_others_sinks_and_a_window(
    slots: int, full: int
) -> None:
    """DuoAttention: as many full heads as the bytes pay for, at most half, by their loss."""
    setting = replace(SETTING, budget_bytes=SHAPE.budget_bytes(slots))
    policy = at("duoattention", setting)
    held = layout(policy, SHAPE)
    sizes = [min(n or 0, 512) for n in held.slots]
    assert sizes[:full] == [512] * full
    assert max(sizes[full:]) - min(sizes[full:]) <= 1
    assert (slots - 1) * 4 <= sum(sizes) <= slots * 4 and min(sizes) >= 4 + 16 + 1
    assert held.bytes_peak(512) == SHAPE.budget_bytes(1) * sum(sizes) // 4
    if full < 2:  # another one would leave the others less than sinks, window and the new token
        assert slots * 4 < (full + 1) * 512 + (3 - full) * 21


@pytest.mark.parametrize("per", ["layer", "head"])
def test_bits_keep_to_the_mean_and_go_where_they_save_most(per: str) -> None:
    policy = build(dict(bits=per, tiers="k4v4", group=16), SETTING)
    assert policy.head_tiers is not None and policy.head_tiers.per_head == (per == "head")
    parts = layout(policy, SHAPE).layers
    bits = [sum((t.key_bits + t.value_bits) for t in p.policy.tiers) for p in parts]
    heads = [len(p.heads) for p in parts]
    assert np.average(bits, weights=heads) <= 8 and bits[0] > 8 > bits[-1]


def test_what_was_not_measured_is_named() -> None:
    bare = replace(SETTING, heads=None)
    with pytest.raises(PolicyError, match="heads to be measured"):
        build(dict(budgets="heads"), bare)
    with pytest.raises(PolicyError, match="KV heads measured"):
        build(dict(bits="head", tiers="k4v4"), bare)
    with pytest.raises(PolicyError, match="single tier"):
        build(dict(bits="head", tiers="8-4"), SETTING)
