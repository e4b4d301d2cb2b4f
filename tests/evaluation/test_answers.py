"""Forks of a cache, and answers to prompts: what a deployed cache gives token by token."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.evaluation.part import losses
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, layout
from kvsearch.policy_space import Setting, build
from kvsearch.workloads import Ask, Item, Prompts, See
from kvsearch.workloads.items import ids
from kvsearch.workloads.measured_parts import Part
from tests.cache_cases import head_dim, policy_of

RNG = np.random.default_rng(3)
NAMES = [
    "full", "lacache", "h2o+int4", "snapkv-prompt", "kivi2", "three tiers",
    "heads that share their layer's slots", "kvzip", "reread in uneven heads",
]  # fmt: skip


def tokens(n: int) -> np.ndarray:
    return RNG.integers(0, 97, n)


@pytest.mark.parametrize(
    ("name", "packed"), [*((n, True) for n in NAMES), ("h2o+int4", False), ("lacache", False)]
)
def test_a_fork_is_what_a_fresh_cache_fed_the_same_would_be(
    name: str, packed: bool, models: dict[int, LoadedModel]
) -> None:
    policy, model = policy_of(name), models[head_dim(name)].model
    # asks that are long enough for a compaction after 126 or 128 tokens
    context, one, other = (torch.from_numpy(tokens(n))[None] for n in (120, 14, 11))

    def fresh(*calls: torch.Tensor) -> tuple[torch.Tensor, int]:
        cache = PolicyCache(policy, model, packed=packed)
        with torch.inference_mode():
            last = [model(x, past_key_values=cache).logits for x in calls][-1]
        return last, cache.bytes_resident

    base = PolicyCache(policy, model, packed=packed)
    with torch.inference_mode():
        model(context, past_key_values=base)
        before = base.bytes_resident
        wanted = [fresh(context, *ask.split(1, 1)) for ask in (one, other)]
        for ask, (want, size) in zip((one, other, one), (*wanted, wanted[0]), strict=True):
            cache = base.fork()
            got = [model(x, past_key_values=cache).logits for x in ask.split(1, 1)][-1]
            assert torch.equal(got, want) and cache.bytes_resident == size
        assert base.bytes_resident == before and base.get_seq_length() == 120


def test_a_fork_shares_the_weights_of_a_rule(models: dict[int, LoadedModel]) -> None:
    loaded, policy = models[16], policy_of("criticalkv")
    cache = PolicyCache(policy, loaded.model)
    with torch.inference_mode():
        loaded.model(torch.from_numpy(tokens(120))[None], past_key_values=cache)
    weights = [s.output.weight.data_ptr() for s in cache.fork().groups if s.output is not None]
    layers = loaded.model.model.layers
    assert weights == [x.self_attn.o_proj.weight.data_ptr() for x in layers]


CHAT = Item(
    "chat", "chat", tokens(90),
    (
        Ask(tokens(7), tokens(4)),
        Ask(tokens(5), tokens(3), follows=True),
        Ask(ids([]), tokens(6)),
        Ask(tokens(20), tokens(1)),
    ),
)  # fmt: skip


APART = Item(
    "apart", "apart", tokens(90),
    (
        Ask(tokens(7), tokens(4)), Ask(ids([]), tokens(6)), Ask(tokens(7), tokens(4)),
        Ask(ids([]), tokens(1)), Ask(ids([]), tokens(1)), Ask(tokens(7), tokens(4)),
    ),
)  # fmt: skip


class Fed:
    """Deployed caches that are fed calls; the first call of an item is taken in once."""

    def __init__(self, policy: Policy, loaded: LoadedModel) -> None:
        self.policy, self.model = policy, loaded.model
        self.begun: dict[bytes, tuple[PolicyCache, torch.Tensor]] = {}

    def after(self, first: np.ndarray) -> tuple[PolicyCache, torch.Tensor]:
        """A cache that has seen `first`, and the logits after it."""
        key = first.tobytes()
        if key not in self.begun:
            cache = PolicyCache(self.policy, self.model, native=torch.float64)
            self.begun[key] = cache, self.call(cache, first)
        cache, last = self.begun[key]
        return cache.fork(), last

    def call(self, cache: PolicyCache, call: np.ndarray) -> torch.Tensor:
        return self.model(torch.from_numpy(call)[None], past_key_values=cache).logits[0, -1]

    def loss(self, first: np.ndarray, *calls: np.ndarray, answer: np.ndarray) -> float:
        """What an answer loses that comes token by token after these calls."""
        lost = []
        with torch.inference_mode():
            cache, last = self.after(first)
            for call in (c for c in calls if c.size):
                last = self.call(cache, call)
            for i, token in enumerate(answer):
                lost.append(-float(last.double().log_softmax(-1)[token]))
                last = self.call(cache, answer[i : i + 1])
        return float(np.mean(lost))


def test_asks_of_one_length_are_one_pass(models: dict[int, LoadedModel]) -> None:
    loaded, passes = models[16], []
    hook = loaded.model.base_model.register_forward_pre_hook(
        lambda _, args, given: passes.append((*args, given.get("input_ids"))[0].shape),
        with_kwargs=True,
    )
    answers(Evaluator(loaded), policy_of("h2o+int4"), Prompts("apart", (APART,)), resident=False)
    hook.remove()
    assert [tuple(x) for x in passes[-3:]] == [(1, 90), (3, 10), (1, 5)]


def deployed(policy: Policy, loaded: LoadedModel, item: Item, see: str) -> list[float]:
    """What every answer of an item loses in deployed caches; turns that follow come by tokens."""
    fed, found, before = Fed(policy, loaded), list[float](), list[np.ndarray]()
    for ask in item.asks:
        if not ask.follows:
            before = [item.context, ask.question]
            before = [np.concatenate(before)] if see == "aware" else before
        else:
            before.append(ask.question)
        found.append(fed.loss(*before, answer=ask.answer))
        before += [np.array([token]) for token in ask.answer]
    return found


@pytest.mark.parametrize("item", [CHAT, APART], ids=["chat", "asks that share a batch"])
@pytest.mark.parametrize(
    ("name", "see"),
    [*((n, "agnostic") for n in NAMES), *((n, "aware") for n in ("h2o+int4", "snapkv-prompt"))],
)
def test_answers_are_what_a_deployed_cache_gives_token_by_token(
    name: str, see: Any, item: Item, models: dict[int, LoadedModel]
) -> None:
    policy, loaded = policy_of(name), models[head_dim(name)]
    asked = Prompts("some", (item,), see)
    found = answers(Evaluator(loaded), policy, asked, native=torch.float64, resident=False)
    np.testing.assert_allclose(found.nll, deployed(policy, loaded, item, see), atol=1e-4)
    assert found.tokens.tolist() == [a.answer.size for a in item.asks]
    sizes, held = layout(policy, loaded.shape), answers(Evaluator(loaded), policy, asked)
    peak = sizes.bytes_peak(item.longest, asked.prompt)
    assert held.bytes_prompt and held.bytes_end <= peak
    goes_on = (*(a.follows for a in item.asks[1:]), False)
    paths = [(p, n - (not more)) for (p, n), more in zip(item.paths(see), goes_on, strict=True)]
    if not policy.anchors:  # a last token that no turn follows is scored, and not fed
        assert held.bytes_end == max(sizes.bytes_at(n, prompt) for prompt, n in paths)


def test_what_a_prompt_brought_in_stays_within_the_budget(models: dict[int, LoadedModel]) -> None:
    loaded, shape = models[16], models[16].shape
    setting = Setting(shape, shape.budget_bytes(150), 200, prompt=110)
    knobs = {"trigger": "generation", "rule": "redundancy-rkv", "recent_window": 4, "interval": 8}
    policy = build(knobs, setting)
    cache, x = PolicyCache(policy, loaded.model), torch.from_numpy(tokens(200))[None]
    with torch.inference_mode():
        loaded.model(x[:, :110], past_key_values=cache)
        before = [group.store.read()[0].clone() for group in cache.groups]
        for i in range(110, 200):
            loaded.model(x[:, i : i + 1], past_key_values=cache)
            assert cache.bytes_resident <= setting.budget_bytes
    for group, was in zip(cache.groups, before, strict=True):
        assert torch.equal(group.store.read()[0][:, :, :110], was)
        assert 110 + policy.slots - 8 <= group.store.n <= 110 + policy.slots < 150
    cache.reset()
    with torch.inference_mode():  # the next prompt has another length
        loaded.model(x[:, :30], past_key_values=cache)
        loaded.model(x[:, 30:100], past_key_values=cache)
    assert {group.store.n for group in cache.groups} == {30 + policy.slots - 8 + 70 % 8}
    with pytest.raises(KvsearchError, match="no slots beside a prompt of 110 tokens, which stays"):
        build(knobs, replace(setting, budget_bytes=shape.budget_bytes(112)))
    with pytest.raises(KvsearchError, match="neither anchors nor budgets 'adakv'"):
        build({**knobs, "budgets": "adakv"}, setting)


@pytest.mark.parametrize("trigger", ["stream", "prompt+stream"])
def test_a_system_prompt_as_sinks_stays_in_16_bits(
    trigger: str, models: dict[int, LoadedModel]
) -> None:
    """What docs/prompts.md shows: the first 37 tokens are never evicted, nor quantised."""
    loaded, n, shape = models[16], 37, models[16].shape
    knobs = {"trigger": trigger, "rule": "h2o", "tiers": "k4v4", "interval": 8, "recent_window": 4}
    mine = build(knobs, Setting(shape, shape.budget_bytes(40), 160, prompt=90))
    slots = (mine.slots or 0) + n - mine.sinks
    quantizer = mine.quantizer.model_copy(update={"fp16_sinks": True})
    policy = mine.model_copy(update={"sinks": n, "slots": slots, "quantizer": quantizer})
    x, prompt = tokens(160)[None], 0 if trigger == "stream" else 90
    own, cache = stepwise(loaded, policy, x, prompt=max(1, prompt))
    full = stepwise(loaded, Policy(), x[:, : max(n, prompt)], prompt=max(1, prompt))[1]
    for a, b in zip(cache.groups, full.groups, strict=True):
        assert a.store.n <= slots < 160
        for kept, all_of_them in zip(a.store.read(), b.store.read(), strict=True):
            assert torch.equal(kept[:, :, :n], all_of_them[:, :, :n])
    found = Evaluator(loaded).quality(policy, x, prompt=prompt)
    np.testing.assert_allclose(found.nll[:, prompt:], own[:, prompt:], atol=1e-4)
    assert found.bytes_resident == layout(policy, shape).bytes_at(160, prompt)


def test_divergence_is_from_the_full_caches_distribution(models: dict[int, LoadedModel]) -> None:
    loaded, asked = models[16], Prompts("chat", (CHAT,))
    evaluator, policy = Evaluator(loaded), policy_of("window")
    full = answers(evaluator, Policy(), asked, keep=True)
    lost = answers(evaluator, policy, asked, full=full.log, keep=True)
    same = answers(evaluator, Policy(), asked, full=full.log)
    assert same.kl is not None and (same.kl == 0).all() and lost.kl is not None
    for kl, a, b in zip(lost.kl, full.log, lost.log, strict=True):
        want = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
        assert kl == pytest.approx(float(want), rel=1e-4, abs=1e-9)
    assert lost.kl.max() > 1e-5


@pytest.mark.parametrize("name", ["full", "h2o+int4", "heads that share their layer's slots"])
@pytest.mark.parametrize("see", ["agnostic", "aware"])
def test_a_window_with_questions_is_read_once_and_loses_the_same(
    name: str, see: See, models: dict[int, LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Facts hidden in a text are no part of its loss, and their questions none of its reading."""
    evaluator, policy = Evaluator(models[head_dim(name)]), policy_of(name)
    prose = np.ones(80, np.bool_)
    prose[50:60] = False
    items = list[Item]()
    for i in range(2):
        asks = tuple(Ask(ids(tokens(5)), ids(tokens(n))) for n in (3, 3))
        asked = Item(f"facts {i}", f"window {i}", ids(tokens(80)), asks, prose=prose)
        items += [replace(asked, name=f"window {i}", asks=()), asked]
    part = Part("search", tuple(items), see, ("text", "facts") * 2, (0.5, 0.7) * 2, (1.0,) * 4, 40)
    copied = tuple(replace(item, context=item.context.copy()) for item in items)
    apart = losses(evaluator, policy, replace(part, items=copied))
    windows = np.stack([item.context for item in items[::2]])
    whole = evaluator.quality(policy, windows).nll
    scored = np.concatenate([whole[:, 39:49], whole[:, 59:]], 1)
    assert np.allclose(apart.nll[::2, 0], 0.5 * scored.mean(1), atol=1e-6)
    assert apart.strata == () and apart.groups == ("window 0", "window 0", "window 1", "window 1")
    if see == "agnostic":
        monkeypatch.setattr(Evaluator, "quality", None)
    assert np.allclose(losses(evaluator, policy, part).nll, apart.nll, atol=1e-6)


def test_exactness_is_what_greedy_decoding_says(models: dict[int, LoadedModel]) -> None:
    loaded, context = models[16], np.random.default_rng(1).integers(0, 97, 40)  # no near ties
    x = torch.from_numpy(context)[None]
    given = loaded.model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 40:]
    right = Ask(ids([]), given.numpy())
    wrong = Ask(ids([]), np.r_[given.numpy()[:4], (int(given[4]) + 1) % 97])
    item = Item("i", "i", context, (right, wrong))
    found = answers(Evaluator(loaded), Policy(name="full"), Prompts("p", (item,)))
    assert found.exact.tolist() == [True, False]
    assert (found.first[0] == given.numpy()).all()
