"""The deployed cache on Triton's kernels alone, against the same cache on the references."""

import pytest
import torch

from kvsearch.cache import decoding
from kvsearch.cache.layer import empty_layers
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.policy import ModelShape, Policy, Quantizer, Tier
from kvsearch.rules import Attention

D = 64
SHAPE = ModelShape(1, 2, D, 6)
Q = Quantizer(group=32, fp16_sinks=True)
TIERS = (
    Tier(share=0.3),
    Tier(share=0.4, key_bits=8, value_bits=4),
    Tier(share=0.3, key_bits=4, value_bits=2),
)
K2 = (Tier(key_bits=2, value_bits=1),)
POLICIES = {
    "window": Policy(slots=12, sinks=2, interval=2),
    "re-indexed": Policy(
        slots=16, sinks=2, interval=3, positions="cache", tiers=K2, quantizer=Quantizer()
    ),
    "tiers by score": Policy(
        slots=20, sinks=2, recent_window=3, interval=5, tiers=TIERS, quantizer=Q,
        rule=Attention(beta=1),
    ),
    "tiers by age": Policy(slots=20, sinks=2, interval=3, tiers=TIERS, quantizer=Q),
    "rotated": Policy(
        slots=20, interval=4, tiers=K2, quantizer=Quantizer(levels="lloyd", rotate=True)
    ),
}  # fmt: skip


def replay(policy, dtype, softcap=None):
    torch.manual_seed(0)
    rotary = Rotary(100.0 ** (-torch.arange(D // 2) / (D // 2)))
    (layer,) = empty_layers(policy, SHAPE, [rotary], packed=True)
    outs = []
    for m in (24, *[1] * 5):
        q, k, v = (torch.randn(2, h, m, D).to(dtype) for h in (6, 2, 2))
        outs.append(advance(layer, q, k, v, scale=0.2, softcap=softcap))
    return torch.cat(outs, 2), layer


# Store by store, as tokens go that `decode_step` does not take; see `test_step.py` for the others.
# fp16 rounding may change which token is dropped, and all that follows: scores are run in fp32
CASES = [
    ("window", torch.float16),
    ("re-indexed", torch.float16),
    ("tiers by score", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_deployed_cache_runs_on_kernels_alone(name, dtype, kernels_alone, monkeypatch):
    policy = POLICIES[name]
    cap = 5.0 if name == "window" else None
    monkeypatch.setattr(decoding, "_served", lambda group: False)
    want, plain = replay(policy, dtype, cap)
    assert "triton" not in plain.impls.values()

    kernels_alone()
    got, other = replay(policy, dtype, cap)
    assert set(other.impls) >= {"repack_kv"} if policy.compacts else other.impls
    assert set(other.impls.values()) == {"triton"}
    assert other.nbytes == plain.nbytes
    room = 4e-3 if dtype is torch.float16 else 1e-5
    torch.testing.assert_close(got, want, rtol=room, atol=room)


def test_pools_are_read_at_once_on_a_kernel(kernels_alone, monkeypatch):
    monkeypatch.setattr(decoding, "_served", lambda group: False)
    stores = [
        replay(POLICIES[name], torch.float16)[1].groups[0].store
        for name in ("tiers by age", "rotated")
    ]
    want = [store.read() for store in stores]
    kernels_alone()
    assert [len({*store.slot_pools().flatten().tolist()}) for store in stores] == [4, 2]
    for store, right in zip(stores, want, strict=True):
        kv = store.read()
        assert store.ran["repack_kv"] == "triton"
        for x, y in zip(kv, right, strict=True):
            torch.testing.assert_close(x, y)
