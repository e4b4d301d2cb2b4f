"""Values fitted to what the whole prompt would answer: exact, never NaN, and refused elsewhere.

That evaluation and deployed cache agree is checked for all ways in `test_prompts.py`.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvsearch.cache import PolicyCache, biases
from kvsearch.cache import references as references_module
from kvsearch.cache import refit as module
from kvsearch.cache.call import Call
from kvsearch.cache.references import Answers, References
from kvsearch.cache.refit import Whole, fitted
from kvsearch.errors import PolicyError
from kvsearch.exporters import find
from kvsearch.exporters.fields import verdicts
from kvsearch.exporters.project import project
from kvsearch.policy import Policy, Quantizer, Tier
from kvsearch.policy_space import build, load
from kvsearch.policy_space.methods import METHODS
from kvsearch.rules import Reread
from kvsearch.vectors import kit
from tests.cache_cases import AFTER, IDS, tiny

MODEL = tiny(layers=3).model
POLICY = Policy(slots=30, trigger="prompt", refit="values", rule=Reread(), sinks=2)
B, H, G, N, D, LEFT = 2, 3, 2, 40, 8, 12


def taken(policy: Policy, ids: Tensor, packed: bool = True) -> PolicyCache:
    cache = PolicyCache(policy, MODEL, native=torch.float64, packed=packed)
    with torch.inference_mode():
        MODEL(ids, past_key_values=cache)
    return cache


def drawn(references: int, seed: int = 0) -> tuple[Whole, Tensor, Tensor, Tensor]:
    """A prompt, and of its slots the first of each head, 12 of the last and 9 of the others."""
    torch.manual_seed(seed)
    k, v = torch.randn(B, H, N, D).double(), torch.randn(B, H, N, 5).double()
    q = torch.randn(B, H * G, 2 * references, D).double()
    near = torch.randn(B, H, 2 * references, D).double(), torch.randn(B, H, 2 * references, 5)
    there = torch.arange(LEFT) < torch.tensor([9, 9, LEFT])[:, None]
    again = References(Call(q[:, :, ::2], near[0], near[1].double(), scale=0.7), 2)
    return Whole(k, v, [again]), k[:, :, :LEFT], v[:, :, :LEFT], there


def answers(whole: Whole) -> Answers:
    return Answers.of(whole.references, whole.keys, whole.values)


@pytest.mark.parametrize("references", [50, 2])
def test_values_are_the_least_squares_ones(
    references: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head by head as NumPy solves them; few references are answered as the whole prompt does.

    References see beside the slots the tokens that come with them, up to their own.
    """
    monkeypatch.setattr(references_module, "ROWS", 32)  # several maps
    monkeypatch.setattr(module, "RIDGE", 1e-3)  # few are answered nearly in full
    whole, keys, values, there = drawn(references)
    found, asked = fitted(answers(whole), keys, values, there), whole.references[0].call
    at = 2 * np.arange(references)
    hidden = np.arange(2 * references) > np.tile(at, G)[:, None]
    for b in range(B):
        for h in range(H):
            n, q = int(there[h].sum()), asked.q[b, h * G : h * G + G].flatten(0, 1).numpy()
            near_k, near_v = (x[b, h].numpy() for x in (asked.k, asked.v))
            near = np.where(hidden, 0, np.exp(0.7 * q @ near_k.T))

            def shares(k: Tensor, q: Any = q, near: Any = near) -> tuple[Any, Any]:
                x = np.exp(0.7 * q @ k.numpy().T)
                total = x.sum(1, keepdims=True) + near.sum(1, keepdims=True)
                return x / total, near / total

            x, rest = shares(whole.keys[b, h])
            want = x @ whole.values[b, h].numpy() + rest @ near_v
            x, rest = shares(keys[b, h, :n])
            old = values[b, h, :n].numpy()
            lacks = want - x @ old - rest @ near_v
            ridge = np.sqrt(module.RIDGE * (x**2).sum() / n) * np.eye(n)
            system = np.concatenate([x, ridge]), np.concatenate([lacks, 0 * old])
            step = np.linalg.lstsq(*system, rcond=None)[0]
            np.testing.assert_allclose(found[b, h, :n].numpy(), old + step, atol=1e-8)
            left = np.linalg.norm(lacks - x @ step) / np.linalg.norm(lacks)
            assert left < (0.05 if references == 2 else 0.9)


def test_kept_slots_answer_what_was_asked_nearly_as_the_whole_prompt() -> None:
    """The context itself, after it was read again: nearer to the full cache than evicted."""
    ids = torch.from_numpy(IDS[:1, :90])
    lost = {}
    for how in ("none", "values", "values+bias"):
        cache = taken(POLICY.model_copy(update={"refit": how}), ids)
        with torch.inference_mode():
            got = MODEL(ids, past_key_values=cache).logits
            full = MODEL(torch.cat([ids, ids], 1)).logits[:, 90:]
        lost[how] = float((got - full).square().mean())
    assert max(lost["values"], lost["values+bias"]) < 0.7 * lost["none"], lost


def test_weights_of_attention_are_the_bounded_least_squares_ones() -> None:
    """The slope of what is minimised is zero, or upwards where a weight is at its bound."""
    torch.manual_seed(3)
    share = torch.rand(B, H, 60, LEFT).double() ** 3
    want = (share * torch.randn(LEFT).double()).sum(-1) + 0.1 * torch.rand(B, H, 60)
    ridge = torch.full((B, H, 1), 0.3).double()
    w = biases.bounded(share, want, ridge, rounds=3000)
    slope = ((share @ w[..., None])[..., 0] - want)[..., None, :] @ share
    slope = slope[..., 0, :] + ridge * (w - 1)
    low = w < np.exp(-biases.LARGEST) + 1e-9
    assert 0 < low.sum() < low.numel()
    assert (slope[low] > -1e-6).all() and slope[~low].abs().max() < 1e-6
    near = biases.bounded(share, want, ridge)  # as many rounds as a compaction takes
    assert (near - w).abs().mean() < 0.02 * (w - 1).abs().mean()


def test_biases_give_slots_the_attention_of_the_prompt() -> None:
    """References look at the slots as long as at the prompt, nearly, and at the tokens beside."""
    whole, keys, _, there = drawn(50)
    asked, off = answers(whole), [0.0, 0.0]
    found = biases.biases(asked, keys, there)
    total = torch.logaddexp(asked.prompt_mass, asked.near_mass)
    for i, bias in enumerate((0 * found, found)):
        got = (asked.logits(keys, there) + bias[:, :, None] - total).exp().sum(-1)
        off[i] = float((got - asked.share[..., 0]).square().sum())
    assert off[1] < 0.6 * off[0]


def test_a_moved_key_has_its_bias_in_its_logits() -> None:
    """For queries that have something in common, as those of a head have."""
    whole, keys, _, there = drawn(50)
    call = whole.references[0].call
    common = 3 * torch.randn(1, H, 1, 1, D).expand(B, H, G, 1, D).flatten(1, 2)
    alike = replace(whole.references[0], call=replace(call, q=common + 0.3 * call.q))
    asked = answers(replace(whole, references=[alike]))
    want, moved = (
        biases.biases(asked, keys, there),
        biases.with_biases(asked, keys, there, torch.float16),
    )
    got = (asked.logits(moved, there) - asked.logits(keys, there)).mean(2)
    assert want.abs().max() > 0.5
    assert (got - want)[there.expand_as(want)].abs().max() < 0.1


@pytest.mark.parametrize("how", ["values", "values+bias"])
def test_a_prompt_of_one_token_over_and_over_is_fitted_without_nan(how: str) -> None:
    """All of its queries are nearly alike, and so are its keys."""
    policy = POLICY.model_copy(
        update=dict(refit=how, tiers=(Tier(key_bits=3),), quantizer=Quantizer(group=8))
    )
    cache = taken(policy, torch.full((1, 90), 5))
    for group in cache.groups:
        assert all(bool(x.isfinite().all()) for x in group.store.read())
    assert cache.unfitted == 0


@pytest.mark.parametrize("how", ["values", "values+bias"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("factor", [float("nan"), 1e3])
def test_what_cannot_be_solved_or_is_far_too_large_is_left_as_it_was_and_counted(
    factor: float, packed: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = module.fitted

    def broken(*given: Any) -> Tensor:
        found = plain(*given)
        found[:, 1] *= factor
        return found

    monkeypatch.setattr(module, "fitted", broken)
    ids = torch.from_numpy(IDS[:1, :90])
    evicted = taken(POLICY.model_copy(update={"refit": "none"}), ids, packed)
    cache = taken(POLICY.model_copy(update={"refit": how}), ids, packed)
    assert cache.unfitted == 3 and evicted.unfitted == 0
    for side in range(2):
        mine, theirs = (x.groups[0].store.read()[side][0] for x in (cache, evicted))
        moved = side == 1 or how == "values+bias"
        assert torch.equal(mine[1], theirs[1]) and torch.equal(mine[0], theirs[0]) != moved
    cache.reset()
    assert cache.unfitted == 0


def test_values_are_much_worse_at_over_twice_the_distance() -> None:
    """Four times the squared error, head by head, of slots that are the whole prompt."""
    whole, *_ = drawn(50)
    every, old = torch.ones(H, N, dtype=torch.bool), whole.values + 1
    new = whole.values + torch.tensor([1.9, 2.1, 0])[:, None, None]
    found = module.much_worse_alone(answers(whole), every, (whole.keys, old), (whole.keys, new))
    assert found.tolist() == [[False, True, False]] * B


def test_a_prompt_shorter_than_the_slots_is_left_as_it_is() -> None:
    ids = torch.from_numpy(IDS[:1, :28])
    want, got = (taken(POLICY.model_copy(update={"refit": how}), ids) for how in ("none", "values"))
    for a, b in zip(want.groups, got.groups, strict=True):
        assert torch.equal(a.store.read()[1], b.store.read()[1])
    assert not any(layer.references for layer in got.held)


@pytest.mark.parametrize("how", ["values", "values+bias"])
def test_every_row_of_a_batch_is_fitted_alone_and_references_are_let_go(how: str) -> None:
    policy = POLICY.model_copy(update={"refit": how})
    both = taken(policy, torch.from_numpy(IDS[:, :90]))
    for row in range(2):
        alone = taken(policy, torch.from_numpy(IDS[row : row + 1, :90]))
        for a, b in zip(both.groups, alone.groups, strict=True):
            for x, y in zip(a.store.read(), b.store.read(), strict=True):
                assert (x[row] - y[0]).abs().max() < 1e-9
    assert not any(layer.references for layer in both.held)


def test_references_are_spread_over_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references_module, "MOST", 20)
    q = torch.arange(90.0).view(1, 1, 90, 1)
    found = References.of(Call(q, q, q, scale=1.0), 90)
    assert found.call.q.flatten().tolist() == [*range(0, 90, 5)] and found.step == 5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(rule=None), "needs trigger 'prompt', slots, and rule 'reread'"),
        (dict(rule=None, trigger="stream"), "needs trigger 'prompt', slots, and rule 'reread'"),
        (dict(slots=None), "needs trigger 'prompt', slots, and rule 'reread'"),
        (dict(positions="cache"), "needs positions 'original'"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=f"refit 'values' {said}"):
        Policy.build({**POLICY.plain(), **fields})


def test_who_serves_it() -> None:
    """Only the cache itself; kits of vectors refuse it."""
    for name, word in (("transformers", "exact"), ("vllm", "dropped"), ("kvpress", "dropped")):
        found = {v.field: v.verdict for v in verdicts(POLICY, project(POLICY, find(name)))}
        assert found["refit"] == word, name
    with pytest.raises(PolicyError, match="fitted values belong to a certain text or model"):
        kit(POLICY)


def test_it_is_a_knob_and_part_of_the_identity() -> None:
    knobs: dict[str, Any] = dict(rule="reread", trigger="prompt", refit="values")
    policy, plain = (build(knobs | more, AFTER) for more in ({}, {"refit": "none"}))
    assert policy.refits and policy.slots == plain.slots
    assert policy.fingerprint() != plain.fingerprint()
    assert Policy.parse(policy.to_json()) == policy
    with pytest.raises(PolicyError, match="refit 'values' needs trigger 'prompt'"):
        build({**knobs, "rule": "h2o"}, AFTER)
    for name in ("attention-matching", "kvzip+k5v4+refit", "kvzip+k5v4+refit+bias"):
        assert load("prompts").params(METHODS[name].knobs) is not None
