"""Layers on a GPU: as on a CPU, without waiting, in as many launches as counted, and in graphs."""

import json
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvsearch.cache.cuda import captures
from kvsearch.policy import ModelShape, Policy, Quantizer, Tier
from kvsearch.rules import Attention
from tests.cache import test_device, test_launches
from tests.cache.test_captures import capture
from tests.cache.test_device import NAMES, PROMPT, SHARED, WAYS
from tests.cache.test_device import SHAPE as NARROW
from tests.cache.test_launches import FILE, KINDS, OWN, SHAPE, STEPS, TURNED, small
from tests.gpu.layers import CPU, GPU, Layer, off, without_waits
from tests.random_policies import policies

# what falls back would give the same
pytestmark = pytest.mark.filterwarnings("error:(auto passes over|no CUDA graphs)")
WIDE = replace(NARROW, head_dim=64)  # which kernels take
K4 = dict(tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=16))
EVICTED = {
    "XMU's correction": Policy(slots=60, interval=8, rule=Attention(alpha=1, beta=1)),
    "every token": Policy(slots=60, interval=1, rule=Attention(beta=1)),
    "tova": test_device.small("tova"),
    "decay, a recent window in the way": Policy(
        slots=60, interval=4, sinks=3, recent_window=30, **K4,
        rule=Attention(alpha=1, beta=1, horizon=32, kind="decay"),
    ),
    "only the last rows": Policy(slots=60, interval=8, rule=Attention(horizon=5, beta=2)),
    "sinks and quantised": Policy(
        slots=60, interval=8, sinks=4, recent_window=4, rule=Attention(alpha=0.5), **K4
    ),
}  # fmt: skip
NEAR = 2e-3  # in fp32: sums in another order, and now and then a code next to its neighbour


def alike(policy: Policy, way: str, shape: ModelShape = WIDE) -> None:
    """In fp32 as on the CPU, and no call waits; kernels are proved and compiled before."""
    packed, fast, calls = WAYS[way]
    how = {"packed": packed, "fast": fast}
    want = Layer(policy, shape, calls, CPU, **how).run()
    got = Layer(policy, shape, calls, GPU, **how).run()
    assert off(got, want) < NEAR, policy.to_json()
    layer = Layer(policy, shape, calls, GPU, **how)
    with without_waits():
        again = layer.run()
    torch.testing.assert_close(again, got, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_methods_give_what_they_give_on_a_cpu_and_never_wait(name: str, way: str) -> None:
    alike(small(name), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", range(8))
def test_random_policies_give_what_they_give_on_a_cpu(way: str, part: int) -> None:
    for policy in policies(40, WIDE)[part::8]:
        alike(policy, way)


def test_heads_that_share_slots_do_too() -> None:
    alike(SHARED, "deployed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_references_give_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    """Both attend in fp32, and round what they give once."""
    calls = [PROMPT, *[1] * 40]
    policy = small(name)
    want = Layer(policy, WIDE, calls, CPU, dtype, packed=True).run()
    layer = Layer(policy, WIDE, calls, GPU, dtype, packed=True)
    far = off(layer.run(), want)
    ran = layer.held.impls
    print(f"kernels {name} {dtype}: off by {far:.2g}, {ran}")
    assert far < 0.05
    if not name.startswith(("q", "fp8")):  # formats that only torch unpacks
        assert ran.get("decode_step") == "triton", ran


@pytest.mark.parametrize("name", [*test_launches.NAMES, *KINDS, *OWN, TURNED])
def test_a_token_launches_no_more_than_was_counted_without_a_gpu(name: str) -> None:
    shape = KINDS.get(name, SHAPE)
    policy = OWN.get(name) or small(name.partition(",")[0], shape)
    if name == TURNED:
        policy = policy.model_copy(update={"positions": "cache"})
    calls = [test_launches.PROMPT, *[1] * STEPS]
    layer = Layer(policy, shape, calls, GPU, torch.float16, packed=True)
    most: dict[str, int] = {}
    for i, tokens in enumerate(layer.tokens):
        if i < STEPS // 2:
            layer.feed(tokens)
            continue
        held = [g.store.n for g in layer.held.groups]
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            layer.feed(tokens)
            torch.cuda.synchronize()
        ran = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        compacts = any(
            g.store.n != n + 1 or g.store.residual == 0
            for g, n in zip(layer.held.groups, held, strict=True)
        )
        what = "compaction" if compacts else "step"
        most[what] = max(most.get(what, 0), len(ran))
    budget = json.loads(FILE.read_text())["methods"][name]
    print(f"launches {name}: {most}, counted { ({k: budget.get(k) for k in most}) }")
    assert all(n > 0 for n in most.values())  # the profiler has seen something
    assert most.get("step", 0) <= budget.get("step", 0)


ROWS = Policy(
    slots=90, interval=16, sinks=2, recent_window=16,
    tiers=(Tier(share=0.5, key_bits=4, value_bits=4), Tier(share=0.5, key_bits=2, value_bits=2)),
    quantizer=Quantizer(levels="lloyd", rotate=True, fp16_sinks=True),
    rule=Attention(alpha=0.5, beta=1, horizon=8, share="layer"),
)  # fmt: skip
CAPTURED: dict[str, Policy | None] = {
    **dict.fromkeys(("full", "window+int4", "h2o+int4", "rotated+heads", "kivi4")),
    "window of rows, heads together, tiers by rank": ROWS,
    "positions of the cache": ROWS.model_copy(update={"rule": Attention(), "positions": "cache"}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_gives_the_tokens_until_the_next_compaction(
    name: str, dtype: torch.dtype
) -> None:
    policy = CAPTURED[name] or small(name)
    interval = policy.interval if policy.compacts else 16
    calls = [test_launches.PROMPT, *[1] * (3 * interval)]
    one, twin = (Layer(policy, SHAPE, calls, GPU, dtype, packed=True) for _ in range(2))
    for first, tokens in enumerate(one.tokens, 1):
        one.feed(tokens)
        twin.feed(tokens)
        compacted = one.held.groups[0].store.residual == 0
        if first > 1 + interval and (not policy.compacts or compacted):
            break  # a compaction, not the first: none in the tokens that follow
    token = [x.clone() for x in one.tokens[first]]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        out = twin.feed(token)
    replayed = one.tokens[first : first + interval - 1]
    assert replayed
    for tokens in replayed:
        for at, x in zip(token, tokens, strict=True):
            at.copy_(x)
        graph.replay()
        torch.testing.assert_close(out, one.feed(tokens), rtol=0, atol=0)


def test_a_capture_that_fails_leaves_torch_well() -> None:
    row = torch.zeros(1, device="cuda")
    done, fails = [], True

    def step() -> None:
        row.add_(1)
        done.append(1)
        if fails and len(done) > 1:
            row.item()  # waits, which no recording may

    with pytest.raises(captures.NotCaptured) as caught:
        capture(step)
    print(f"reason of a failed capture: {caught.value}")
    torch.randn(3, device="cuda")
    fails = False
    capture(step)()
    assert row.item() == 3


@pytest.mark.parametrize("name", EVICTED)
def test_one_launch_for_all_intervals_evicts_what_torch_evicts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32; in 16 bits torch rounds products, so that others may go. The probe has these."""
    policy = EVICTED[name]
    calls = [2 * (policy.slots or 0) + policy.interval * 28, 7]
    layer = Layer(policy, WIDE, calls, GPU, packed=False)
    got = layer.run()
    assert layer.held.impls["evict_in_place"] == "triton"
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    far = off(got, Layer(policy, WIDE, calls, GPU, packed=False).run())
    print(f"evict_in_place {name}: off by {far:.2g}")
    assert far < NEAR
