"""The deployed cache holds what the policy says, and the evaluator replays it exactly.

Exactness is checked in float64: there, what differs is logic. In float32 a value on the boundary
between two codes may fall on either side, and 30 quantised layers amplify that
(docs/evaluation.md).
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.cache.by_age.plans import plan
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Ladder, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.methods import METHODS
from kvsearch.rules import Attention, Place
from tests.cache_cases import (
    EXTRA,
    IDS,
    NAMED,
    PROMPT,
    T,
    head_dim,
    long_enough,
    policy_of,
    tiny,
)
from tests.random_policies import covering

FEW = covering({name: policy_of(name) for name in NAMED})


@pytest.fixture
def loaded(request: pytest.FixtureRequest, models: dict[int, LoadedModel]) -> LoadedModel:
    """A small model; its heads hold the blocks of the policy that the test calls `name`."""
    call = getattr(request.node, "callspec", None)
    name = call.params.get("name") if call is not None else None
    return models[16 if name is None else head_dim(name)]


# Formats that are compacted at every token and evict nothing go one way through a cache, which
# turboquant_3bit_nc and nvfp4 go as well; that the cut of a stream does not matter they show below.
ALIKE = {"fp8-e4m3", "fp8-e5m2", "int8_per_token_head", "fp8_per_token_head", "q5_1"}
QUICK = {*FEW, *(n for n in NAMED if "shared" in n)} - ALIKE


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in NAMED]
)
def test_one_pass_equals_token_by_token(name: str, loaded: LoadedModel) -> None:
    policy = policy_of(name)
    sizes = layout(policy, loaded.shape)
    tokens, prompt = long_enough(sizes), PROMPT if policy.trigger != "stream" else 1
    rows = 1 if policy.budgets.kind == "adakv" else 2  # which serves no batches
    ids = IDS[:rows, :tokens]
    slow, cache = stepwise(loaded, policy, ids, prompt=prompt)
    quality = Evaluator(loaded, batch=2).quality(policy, ids, prompt=prompt)
    assert np.abs(slow - quality.nll).max() < 1e-5
    assert cache.bytes_resident == sizes.bytes_at(tokens, prompt) == quality.bytes_resident
    # unequal ladders are out of phase, and AdaKV's heads peak at different steps
    if policy.ladder is None and policy.budgets.kind != "adakv":
        assert cache.bytes_peak_resident == sizes.bytes_peak(tokens, prompt)
    assert cache.bytes_peak_resident >= sizes.bytes_peak(tokens, prompt)


@pytest.mark.parametrize("name", FEW)
def test_the_cut_of_the_stream_does_not_matter_and_bytes_hold_at_every_step(
    name: str, loaded: LoadedModel
) -> None:
    policy = policy_of(name)
    first = PROMPT if policy.trigger != "stream" else 23
    sizes, cache = layout(policy, loaded.shape), PolicyCache(policy, loaded.model)
    whole = PolicyCache(policy, loaded.model, packed=False)
    ids, seen, parts = torch.from_numpy(IDS[:1]), 0, []
    cuts = [first, 1, 1, 1, 1, 1, 1, 1, 1, 13, 1, 8]
    with torch.inference_mode():
        for m in [*cuts, T - sum(cuts)]:
            parts.append(loaded.model(ids[:, seen : seen + m], past_key_values=cache).logits)
            seen += m
            assert cache.bytes_resident == sizes.bytes_at(seen, first)
            assert cache.bytes_resident <= sizes.bytes_peak(T, first)
        if policy.trigger == "stream":
            once = loaded.model(ids, past_key_values=whole).logits
            assert (torch.cat(parts, 1) - once).abs().max() < 1e-5


@pytest.mark.parametrize("positions", ["original", "cache"])
@pytest.mark.parametrize("score", [None, Attention(beta=1)])
def test_a_cache_that_never_fills_is_the_unmodified_model(
    positions: Any, score: Attention | None, loaded: LoadedModel
) -> None:
    policy = Policy(slots=T + 1, sinks=2, recent_window=3, positions=positions, rule=score)
    ids = torch.from_numpy(IDS)
    with torch.inference_mode():
        theirs = loaded.model(ids).logits
        cache = PolicyCache(policy, loaded.model, native=torch.float64)
        parts = [
            loaded.model(x, past_key_values=cache).logits for x in ids.split([50, 1, T - 51], 1)
        ]
    assert (torch.cat(parts, 1) - theirs).abs().max() < 1e-5  # rotary angles are fp32


def test_what_is_no_policy_is_named(loaded: LoadedModel) -> None:
    with pytest.raises(TypeError, match=r"takes a Policy, got str; .* PolicyCache\.from_json"):
        PolicyCache("streamingllm", loaded.model)  # type: ignore[arg-type]


def test_adakv_gives_slots_to_the_heads_that_rank_best_and_keeps_the_total(
    loaded: LoadedModel,
) -> None:
    policy = EXTRA["heads that share their layer's slots"]
    parts, cache = layout(policy, loaded.shape).layers, PolicyCache(policy, loaded.model)
    ids, seen = torch.from_numpy(IDS[:1]), 0
    least = parts[0].target or 0
    even = least - policy.sinks - policy.recent_window
    floor = policy.sinks + policy.recent_window + int(policy.budgets.floor * even)
    found = set()
    with torch.inference_mode():
        for m in (80, *[policy.interval] * 8):  # each call ends with a compaction
            loaded.model(ids[:, seen : seen + m], past_key_values=cache)
            seen += m
            for one, other in zip(cache.groups[::2], cache.groups[1::2], strict=True):
                held = one.store.n, other.store.n
                assert sum(held) == 2 * least and min(held) >= floor
                found.add(held)
    assert any(a != b for a, b in found)


def kept(layers: int, slots: int, ladder: Ladder, steps: int) -> list[list[int]]:
    """Token ids that each layer holds after `steps` tokens, by the segments' rule."""
    policy = Policy(slots=slots, sinks=4, recent_window=8, ladder=ladder)
    out = []
    for layer in layout(policy, ModelShape(layers, 1, 8, 1)).layers:
        live, cursor = torch.empty(0, dtype=torch.long), 0
        for t in range(steps):
            live = torch.cat([live, torch.tensor([t])])
            index, cursor = layer.evictions.by_age(len(live), cursor)
            live = live if index is None else live[torch.from_numpy(index)]
        out.append(live.tolist())
        assert plan(layer, steps, 0).held.tolist() == out[-1]  # the one-pass replay agrees
    return out


def ranges(*ends: int | tuple[int, int]) -> list[int]:
    return [t for e in ends for t in (range(e[0], e[1] + 1) if isinstance(e, tuple) else [e])]


def test_lacaches_worked_example_slot_for_slot() -> None:
    one = Ladder(span=2 / 8, overlap=1 / 2)
    modular = kept(8, 35, one, 35)
    assert modular[0] == modular[6] == ranges((0, 5), (11, 34))
    assert modular[3] == ranges((0, 3), 7, 8, (11, 34))
    assert modular[5] == ranges((0, 3), (9, 34))
    twice = kept(8, 35, one, 40)
    assert twice[2] == ranges((0, 3), 6, 7, 13, 14, (18, 39))
    assert twice[5] == ranges((0, 3), 9, 10, (16, 39))
    contiguous = kept(8, 35, Ladder(span=2 / 8, overlap=1 / 2, order="contiguous"), 35)
    assert contiguous[1] == ranges((0, 5), (11, 34))
    assert contiguous[4] == ranges((0, 3), 7, 8, (11, 34))
    assert contiguous[7] == ranges((0, 3), (9, 34))
    late = kept(8, 35, one, 95)
    assert late[0] == ranges((0, 5), 26, 32, 53, 54, 60, 61, 67, 68, 74, 75, (81, 94))
    assert late[3] == ranges((0, 3), 15, 21, 42, 43, 56, 57, 63, 64, 70, 71, 77, 78, (81, 94))
    wide = kept(8, 34, Ladder(span=3 / 8, overlap=1 / 3), 40)
    assert wide[0] == ranges((0, 5), 8, 9, 12, 13, 16, 17, (20, 39))
    assert wide[2] == ranges((0, 3), 6, 7, 10, 11, 14, 15, (18, 39))
    pairs = kept(8, 33, Ladder(span=4 / 8, overlap=0), 64)
    assert pairs[0] == ranges((0, 4), *range(8, 45, 4), 46, (48, 63))
    assert pairs[1] == ranges((0, 3), 7, *range(11, 44, 4), 45, 47, (48, 63))


def place(heads: int, interval: int) -> Place:
    return Place(heads, heads, 8, interval, 1, torch.device("cpu"))


@pytest.mark.parametrize("heads", [2, 200])
def test_few_and_many_sums_are_smoothed_alike(heads: int) -> None:
    scorer = Attention(pool=5).scorer(place(heads, 32))
    total = torch.rand(1, heads, 40)
    near = torch.nn.functional.avg_pool1d(total[..., :30], 5, stride=1, padding=2)
    assert torch.equal(scorer.smooth(total, 30), torch.cat([near, total[..., 30:]], -1))


def test_a_better_tier_holds_no_token_that_was_ever_in_a_worse_one() -> None:
    policy = Policy(
        interval=4,
        recent_window=1,
        rule=Attention(horizon=4),
        tiers=(
            Tier(share=0.3, key_bits=8, value_bits=8),
            Tier(share=0.7, key_bits=1, value_bits=1),
        ),
        quantizer=Quantizer(group=16),
    )
    loaded = tiny(1)
    cache, ids = PolicyCache(policy, loaded.model), torch.from_numpy(IDS[:1])
    was_low = torch.zeros(1, 2, 0, dtype=torch.bool)
    with torch.inference_mode():
        for i in range(0, 80, 4):
            loaded.model(ids[:, i : i + 4], past_key_values=cache)
            low = cache.groups[3].store.slot_pools() == 1
            was_low = torch.nn.functional.pad(was_low, (0, 4))
            assert not bool((was_low & ~low).any())
            was_low |= low
    assert bool(was_low.any()) and not bool(was_low.all())


def real_text(loaded: LoadedModel, tokens: int) -> np.ndarray:
    text = "The cache of a language model grows with every token that it reads, and so does " * 9
    return np.asarray(loaded.tokenizer(text)["input_ids"][:tokens])[None]


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o+int4-fine", "xmu-0.4"])
def test_real_model_replay_is_exact_in_fp64_with_real_bytes(
    name: str, real_model: LoadedModel
) -> None:
    """In float64 no value lies so close to a code's boundary that the order of a sum decides."""
    loaded = replace(real_model, model=copy.deepcopy(real_model.model).double())
    shape, ids = loaded.shape, real_text(loaded, 72)
    knobs = {**METHODS[name].knobs, "interval": 8, "recent_window": 12}
    policy = build(knobs, Setting(shape, shape.budget_bytes(40), 72), name=name)
    slow, cache = stepwise(loaded, policy, ids)
    quality = Evaluator(loaded).quality(policy, ids)
    assert np.abs(slow - quality.nll).max() < 1e-4
    assert cache.bytes_resident == quality.bytes_resident == layout(policy, shape).bytes_at(72)
