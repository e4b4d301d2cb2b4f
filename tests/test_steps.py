"""A decoded token that all heads of a layer take in with one op."""

import random
from dataclasses import replace

import pytest
import torch

from kvsearch.cache import PolicyCache, steps
from kvsearch.policy import Policy, layout
from kvsearch_kernels.decode_step import Heads, Stores, decode_step
from tests import random_policies
from tests.cache_cases import tiny

MODEL = tiny(dtype=torch.float32)


def copied(stores: Stores) -> Stores:
    """Stores with pools and sums of their own."""
    kinds = []
    for heads in stores.heads:
        pool, sums = heads.parts[-1], heads.sums
        fields = (getattr(pool, f).clone() for f in ("keys", "values", "lengths"))
        own = replace(pool, **dict(zip(("keys", "values", "lengths"), fields, strict=True)))
        sums = None if sums is None else replace(sums, sums=sums.sums.clone())
        kinds.append(Heads([*heads.parts[:-1], own], sums))
    return Stores(kinds)


class Twice:
    """The op, and beside it the reference on a copy of what it writes to."""

    def __init__(self):
        self.calls = 0

    def pick(self, *args, **kwargs):
        return decode_step.pick(*args, **kwargs)

    def record(self, ran, q, k, v, stores, **kwargs):
        other = copied(stores)
        want = decode_step.reference(q, k, v, other, **kwargs)
        got = decode_step.record(ran, q, k, v, stores, **kwargs)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        for a, b in zip(stores.heads, other.heads, strict=True):
            assert torch.equal(a.parts[-1].lengths, b.parts[-1].lengths)
            if a.sums is not None:
                torch.testing.assert_close(a.sums.sums, b.sums.sums, rtol=1e-4, atol=1e-4)
        self.calls += 1
        return got


def decoded(policy: Policy, tokens: int) -> PolicyCache:
    """A prompt, tokens one by one, a second turn, and tokens again; bytes are exact throughout."""
    cache = PolicyCache(policy, MODEL.model, tokenizer=MODEL.tokenizer)
    ids = torch.randint(3, 90, (1, 200), generator=torch.Generator().manual_seed(5))
    sizes, done = layout(policy, MODEL.shape), 0
    turns = [30] if policy.prompted else [30, tokens, 9]
    with torch.inference_mode():
        for many in turns:
            for m in [many] if many in (30, 9) else [1] * many:
                MODEL.model(ids[:, done : done + m], past_key_values=cache, use_cache=True)
                done += m
        for _ in range(tokens):
            MODEL.model(ids[:, done : done + 1], past_key_values=cache, use_cache=True)
            done += 1
            if policy.anchors is None and policy.budgets.kind != "adakv":
                assert cache.bytes_resident == sizes.bytes_at(done, 30)
    return cache


@pytest.mark.parametrize("seed", range(40))
def test_random_policies_decode_as_store_by_store(seed, monkeypatch):
    policy = random_policies.policy(random.Random(seed), MODEL.shape)
    op = Twice()
    monkeypatch.setattr(steps, "decode_step", op)
    cache = decoded(policy, 25)
    served = all(steps._served(state) for layer in cache.layers for state in layer.states)
    assert (op.calls > 0) == served
    assert len({state.store.n for state in cache.layers[0].states}) <= len(cache.layers[0].states)
