"""A decoded token that all heads of a layer take in with one op: as store by store."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from kvsearch.cache import PolicyCache, decoding, entering
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.cache.ways import advance
from kvsearch.policy import Policy, Quantizer, Tier, check
from kvsearch.rules import Attention
from kvsearch.rules.attention import AttentionScorer
from kvsearch.rules.expected_attention import ExpectedAttention, ExpectedAttentionScorer
from tests import random_policies
from tests.cache_cases import EXTRA, tiny

MODEL = tiny(dtype=torch.float32)
SHAPE = MODEL.shape
SEEDS = 30  # from here on policies rank by queries
RARE = [
    name for name, p in EXTRA.items()
    if p.quantizer.along == "tokens" or p.budgets.kind == "adakv"
]  # fmt: skip
REFERENCE = {"vllm-int", "vllm-fp8", "turboquant-k", "turboquant-v", "nvfp4"}  # without a loop
B, MANY = 2, (30, *[1] * 25, 9, *[1] * 20)  # a prompt, tokens, a second turn, tokens


def outputs(policy: Policy, layer: int) -> Iterator[tuple[torch.Tensor, PolicyCache]]:
    """What one layer gives for the same queries, keys and values, call by call."""
    cache = PolicyCache(policy, MODEL.model, tokenizer=MODEL.tokenizer)
    held = cache.held[layer]
    draw, batch = torch.Generator().manual_seed(3), B
    if policy.budgets.kind == "adakv":
        batch = 1  # it serves no batches
    for i, m in enumerate(MANY):
        if m > 1 and i and policy.after_prompt:
            continue
        qkv = (
            torch.randn(batch, h, m, SHAPE.head_dim, generator=draw)
            for h in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        )
        with torch.inference_mode():
            yield advance(held, *qkv, scale=0.4), cache
            if i == 12:  # as beam search does
                cache.layers[layer].reorder_cache(torch.tensor([batch - 1] * batch))


def some(which: int | str) -> Policy:
    """A random policy, or one that hardly ever is among them."""
    if isinstance(which, str):
        return EXTRA[which]
    found = random_policies.policy(random.Random(which), SHAPE)
    if which >= SEEDS:
        found = found.model_copy(update={"rule": ExpectedAttention(skip=which % 40)})
        check(found, SHAPE)
    return found


@pytest.mark.parametrize("which", [*range(0, SEEDS, 2), *range(SEEDS, SEEDS + 10, 3), *RARE])
def test_random_policies_decode_as_store_by_store(which, monkeypatch):
    policy = some(which)
    if policy.rereads:
        pytest.skip("a second reading needs calls of the model")
    layer = which % SHAPE.layers if isinstance(which, int) else 1
    together = list(outputs(policy, layer))
    with monkeypatch.context() as m:
        m.setattr(decoding, "_served", lambda group: False)
        apart = list(outputs(policy, layer))
    for (out, _), (want, _) in zip(together, apart, strict=True):
        torch.testing.assert_close(out, want, rtol=0, atol=1e-4)
    mine, its = (done[-1][1].held[layer] for done in (together, apart))
    assert (mine.seen, mine.peak_bytes) == (its.seen, its.peak_bytes)
    for a, b in zip(mine.groups, its.groups, strict=True):
        assert (a.store.n, a.store.residual) == (b.store.n, b.store.residual)
        assert (a.nbytes, a.peak) == (b.nbytes, b.peak)
        if isinstance(a.scorer, AttentionScorer) and isinstance(b.scorer, AttentionScorer):
            torch.testing.assert_close(a.scorer.sums, b.scorer.sums, rtol=1e-3, atol=1e-3)
            assert a.scorer.born is None or torch.equal(a.scorer.born, b.scorer.born)
        if isinstance(a.scorer, ExpectedAttentionScorer):
            assert isinstance(b.scorer, ExpectedAttentionScorer)
            assert a.scorer.count == b.scorer.count > 0
            torch.testing.assert_close(a.scorer.total, b.scorer.total)
            torch.testing.assert_close(a.scorer.outer, b.scorer.outer, rtol=1e-4, atol=1e-4)
        for x, y in zip(a.store.read(), b.store.read(), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    book = {policy.quantizer.levels, policy.quantizer.value_levels or policy.quantizer.levels}
    served = all(map(decoding._served, mine.groups))
    if served and "decode_step" not in mine.impls:  # by its reference it would gain nothing
        assert policy.quantizes and book & REFERENCE
    else:
        assert ("decode_step" in mine.impls) == served


def tier(keys: int, values: int, **more: bool) -> dict[str, object]:
    tiers = (Tier(key_bits=keys, value_bits=values),)
    return {"tiers": tiers, "quantizer": Quantizer(group=16, **more)}


AT_ONCE = {
    "as the zoo has it": Policy(
        slots=48, recent_window=8, rule=Attention(beta=1), **tier(5, 4, rotate=True)
    ),
    "the token itself may leave": Policy(
        slots=20, sinks=2, rule=Attention(alpha=1, beta=1), **tier(4, 3)
    ),
    "tova": Policy(slots=20, rule=Attention(horizon=1, share="layer"), **tier(8, 8)),
    "decay": Policy(slots=60, rule=Attention(alpha=0.5, beta=1, horizon=16, kind="decay")),
    "the oldest leaves": Policy(slots=40, sinks=4, **tier(4, 16)),
    "all stay": Policy(**tier(2, 8)),
}


@pytest.mark.parametrize("asked", AT_ONCE.values(), ids=AT_ONCE)
def test_tokens_enter_their_tier_at_once_as_by_compactions(asked, monkeypatch):
    # room for few tokens, and a table of few ages: the layer is described anew in between
    monkeypatch.setattr(entering, "LEAST", 8)
    monkeypatch.setattr(entering, "divisors", lambda rule, _, n: rule.divided(torch.arange(n + 1)))
    opened, real = list[object](), entering.opened
    monkeypatch.setattr(entering, "opened", lambda *args: opened.append(args) or real(*args))
    at_once = list(outputs(asked, 1))
    mine = at_once[-1][1].held[1]
    assert len(opened) > 2  # again as room ends, and after the second turn
    monkeypatch.setattr(entering, "serves", lambda layer: False)
    compacted = list(outputs(asked, 1))
    its = compacted[-1][1].held[1]
    for (out, _), (want, _) in zip(at_once, compacted, strict=True):
        assert torch.equal(out, want)
    assert (mine.seen, mine.peak_bytes, mine.nbytes) == (its.seen, its.peak_bytes, its.nbytes)
    for a, b in zip(mine.groups, its.groups, strict=True):
        held = [*a.store.read(), a.store.slot_pools()], [*b.store.read(), b.store.slot_pools()]
        if a.scorer is not None:
            for x, group in zip(held, (a, b), strict=True):
                x += filter(lambda y: y is not None, (group.scorer.sums, group.scorer.born))
        assert all(map(torch.equal, *held))


@torch.inference_mode()
def test_a_fork_shares_no_room_with_the_cache_that_it_was_taken_from():
    model = MODEL.model
    ids = torch.randint(0, model.config.vocab_size, (1, 60), generator=torch.Generator())

    def fed(cache, tokens):
        return torch.cat([model(x, past_key_values=cache).logits for x in tokens.split(1, 1)], 1)

    cache, alone = (PolicyCache(AT_ONCE["as the zoo has it"], model) for _ in range(2))
    for each in (cache, alone):
        model(ids[:, :20], past_key_values=each)
        fed(each, ids[:, 20:30])
    fork = cache.fork()
    fed(cache, ids[:, 45:60])
    assert torch.equal(fed(fork, ids[:, 30:45]), fed(alone, ids[:, 30:45]))


def storages(layer: Layer) -> set[StorageWeakRef]:
    """Memory of what is held of all slots, without holding it."""
    tensors = list[torch.Tensor]()
    for store in (group.store for group in layer.groups):
        assert isinstance(store, PackedStore)
        for held in filter(None, (*store.keys, *store.values)):
            tensors += held
    return {StorageWeakRef(x.untyped_storage()) for x in tensors}


def test_what_a_compaction_replaces_is_freed_at_once():
    """What described the layer before held the old pools until the next token: twice the bytes."""
    replaced = 0
    for which in (x for x in [*range(10), *RARE] if not some(x).rereads):
        before = set[StorageWeakRef]()
        for _, cache in outputs(some(which), 1):
            now = storages(cache.held[1])
            assert all(x.expired() for x in before - now), which
            replaced, before = replaced + len(before - now), now
    assert replaced > 50
