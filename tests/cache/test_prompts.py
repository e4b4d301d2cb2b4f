"""Many tokens at once leave a deployed cache as they would one by one: prompts, turns, chunks.

That the cut of a stream does not matter is also checked for methods in `test_cache.py`.
"""

import numpy as np
import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Anchors, HeadTiers, Policy, Quantizer, Tier, layout
from kvsearch.rules import RULES
from kvsearch_kernels.codebooks import CODEBOOKS
from tests.cache_cases import NAMED, head_dim, policy_of, tiny
from tests.random_policies import policies

IDS = torch.from_numpy(np.random.default_rng(1).integers(0, 97, size=(1, 152)))
RANDOM, PART = 400, 20  # policies, and those of one test
QUICK = 1  # parts that are tested each time


@pytest.fixture(scope="module")
def models() -> dict[int, LoadedModel]:
    """By head size; the one of random policies has fewer layers."""
    return {D: tiny(head_dim=D) for D in (16, 32)} | {0: tiny(head_dim=32, layers=2)}


def case(name: str, models: dict[int, LoadedModel]) -> tuple[Policy, LoadedModel]:
    return policy_of(name), models[head_dim(name)]


def taken(
    policy: Policy, loaded: LoadedModel, cuts: tuple[int, ...], packed: bool = True
) -> tuple[torch.Tensor, PolicyCache]:
    """Losses in nats of all tokens but the first, and the cache after them."""
    cache, seen, parts = PolicyCache(policy, loaded.model, packed=packed), 0, []
    with torch.inference_mode():
        for m in cuts:
            parts.append(loaded.model(IDS[:, seen : seen + m], past_key_values=cache).logits)
            seen += m
    logits = torch.cat(parts, 1)[0, :-1]
    return torch.nn.functional.cross_entropy(logits, IDS[0, 1:seen], reduction="none"), cache


@pytest.mark.parametrize(
    "part",
    [pytest.param(i, marks=[pytest.mark.slow] * (i >= QUICK)) for i in range(RANDOM // PART)],
)
def test_random_policies_equal_token_by_token(part: int, models: dict[int, LoadedModel]) -> None:
    """As they are evaluated, too, in one pass or two: of every rule, tier, trigger and budget."""
    loaded = models[0]
    drawn = policies(RANDOM, loaded.shape, seed=17)
    for i, policy in list(enumerate(drawn))[part * PART : (part + 1) * PART]:
        want = equal(policy, loaded, (50, 1, 13, 9, 7))
        passes = (80,) if policy.trigger == "stream" and i % 2 else (50, 30)
        got, _ = taken(policy, loaded, passes, packed=False)
        assert (got - want).abs().max() < 1e-4, policy.to_json()


def test_random_policies_have_every_rule_trigger_and_budget(models: dict[int, LoadedModel]) -> None:
    drawn = policies(RANDOM, models[0].shape, seed=17)
    untrained = [rule for rule in RULES.values() if "hidden" not in rule.needs]
    assert {type(p.rule) for p in drawn} == {type(None), *untrained}
    assert {p.trigger for p in drawn} == {"stream", "prompt", "prompt+stream"}
    assert {p.budgets.kind for p in drawn} == {"uniform", "pyramid", "sensitivity"}
    assert {p.quantizer.levels for p in drawn} == {*CODEBOOKS}
    assert {len(p.tiers) for p in drawn} == {1, 2, 3}


def equal(policy: Policy, loaded: LoadedModel, cuts: tuple[int, ...]) -> torch.Tensor:
    """Assert that calls of such sizes leave what single tokens do; gives these tokens' losses."""
    first = cuts[0] if policy.trigger != "stream" else 1
    want, slow = taken(policy, loaded, (first, *[1] * (sum(cuts) - first)))
    got, fast = taken(policy, loaded, cuts)
    assert (got - want).abs().max() < 1e-4, policy.to_json()
    held = layout(policy, loaded.shape).bytes_at(sum(cuts), cuts[0])
    assert fast.bytes_resident == slow.bytes_resident == held
    assert [layer.seen for layer in fast.held] == [layer.seen for layer in slow.held]
    for a, b in zip(fast.groups, slow.groups, strict=True):
        assert (a.store.n, a.store.residual) == (b.store.n, b.store.residual)
        assert policy.ladder is None or a.cursor == b.cursor
        assert bool((a.store.slot_pools() == b.store.slot_pools()).all())
        for x, y in zip(a.store.read(), b.store.read(), strict=True):
            assert (x - y).abs().max() < 1e-4, policy.to_json()
    return want


PROMPTED = [name for name in NAMED if policy_of(name).after_prompt]
CALLS = (7, 1, 1, 20, 1)  # what follows the prompt, call by call
OTHERS = [("the prompt stays", calls) for calls in ((33, 12), (1, 9, 1, 40))]


@pytest.mark.parametrize(
    ("name", "calls"), [*((name, CALLS) for name in (*PROMPTED, "protected prompt")), *OTHERS]
)
def test_a_question_of_any_length_follows_a_prompt(
    name: str, calls: tuple[int, ...], models: dict[int, LoadedModel]
) -> None:
    """A document in one call, then questions: the evaluator's own case, bytes after every call."""
    protected = Policy(anchors=Anchors(at=6, protected="prompt"))
    policy, loaded = (protected, models[16]) if name == "protected prompt" else case(name, models)
    prompt, stop = 72, 72 + sum(calls)
    cache, sizes, seen, parts = PolicyCache(policy, loaded.model), None, 0, []
    if policy.anchors is None:  # with which the text decides the bytes
        sizes = layout(policy, loaded.shape)
    with torch.inference_mode():
        for m in (prompt, *calls):
            parts.append(loaded.model(IDS[:, seen : seen + m], past_key_values=cache).logits)
            seen += m
            assert sizes is None or cache.bytes_resident == sizes.bytes_at(seen, prompt)
    got = torch.nn.functional.cross_entropy(
        torch.cat(parts, 1)[0, :-1], IDS[0, 1:stop], reduction="none"
    )
    quality = Evaluator(loaded).quality(policy, IDS[:, :stop].numpy(), prompt=prompt)
    assert np.abs(got.numpy() - quality.nll[0]).max() < 1e-5
    assert cache.bytes_resident == quality.bytes_resident


def test_policies_that_behave_alike_share_no_pools(models: dict[int, LoadedModel]) -> None:
    """All tokens stay in 16 bits, but for one policy that is a tier, and for the other none."""
    loaded = models[16]
    heads = HeadTiers(others=((Tier(),),), of=(1,) * loaded.shape.layers)
    low = Policy(tiers=(Tier(key_bits=8),), head_tiers=heads, quantizer=Quantizer(group=16))
    for policy in (Policy(), low):
        want, _ = taken(policy, loaded, (1,) * 60)
        got, _ = taken(policy, loaded, (20, 1, 39))
        assert (got - want).abs().max() < 1e-9
