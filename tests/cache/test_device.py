"""The device lane: every cache path over tensors that claim to be on another device.

A CPU tensor in the wrong place fails as it would on CUDA. Nothing may wait for the device, and the
results must be those of the same path on the CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.cache.by_age import lifetimes, plans
from kvsearch.cache.channels import View
from kvsearch.cache.layer import Layer
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.projections import Output
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.errors import PolicyError
from kvsearch.policy import Budgets, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import METHODS, at
from kvsearch.rules import RULES, Attention, Rule
from tests.heads import losses
from tests.importance import importance
from tests.launches import kernels
from tests.random_policies import covering, policies
from tests.tagged import ELSEWHERE, Device, here, tagged

T, PROMPT = 130, 90
SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=32, heads=6)
SETTING = Setting(
    SHAPE,
    SHAPE.budget_bytes(76),
    T,
    prompt=PROMPT,
    importance=importance(SHAPE),
    heads=losses(SHAPE),
)
WAYS = {  # packed, fast, and the calls in which a stream comes
    "evaluator": (False, True, [PROMPT, T - PROMPT]),
    "evaluator, by segments": (False, False, [PROMPT, T - PROMPT]),
    "deployed": (True, True, [PROMPT, *[1] * 40]),
}


SHARED = Policy(
    slots=40, interval=8, sinks=2, recent_window=8, rule=Attention(), quantizer=Quantizer(group=32),
    tiers=(Tier(key_bits=4, value_bits=4),), budgets=Budgets(kind="adakv"),
)  # fmt: skip


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Another device; ops run their references, since no kernel could be launched."""
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    yield Device()


def output(shape: ModelShape, put: Callable[[torch.Tensor], torch.Tensor]) -> Output:
    """Some output projection, where `put` puts it."""
    weight = torch.linspace(-9, 9, 7 * shape.heads * shape.head_dim).sin().view(7, -1)
    return Output(put(weight), shape.heads // shape.kv_heads)


def run(
    policy: Policy, packed: bool, fast: bool, calls: Sequence[int], device: Device | None,
    shape: ModelShape = SHAPE, places: Sequence[torch.device] = (ELSEWHERE,),
) -> torch.Tensor:  # fmt: skip
    """Outputs of layer 1, and of one more for each further place, for calls of so many tokens.

    They share rotation and anchors.
    """
    draw, outs = torch.Generator().manual_seed(0), []
    stream = None

    def put(x: torch.Tensor, place: torch.device) -> torch.Tensor:
        return x if device is None else tagged(x, place)

    if policy.anchors is not None:  # ids are read on the host, before any layer runs
        stream = Stream(lambda ids, first: (np.arange(ids.shape[1])[None] + first) % 11 == 3)
        stream.update(torch.zeros(1, sum(calls)), 0)
    with torch.inference_mode(), device or nullcontext():
        rotary = Rotary(put(torch.linspace(0.1, 1, shape.head_dim // 2), places[0]))
        layers = []
        for i, place in enumerate(places, 1):
            how: dict[str, Any] = dict(output=output(shape, partial(put, place=place)))
            how |= dict(packed=packed, rotary=rotary, fast=fast, stream=stream)
            parts = [part for part in layout(policy, shape).layers if part.layer == i]
            layers.append(Layer(policy, parts, **how))
        for m in calls:
            for layer, place in zip(layers, places, strict=True):
                q, k, v = (
                    put(torch.randn(1, heads, m, shape.head_dim, generator=draw), place)
                    for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
                )
                out = advance(layer, q, k, v, scale=0.2)
                if device is not None:
                    assert out.device == place
                    assert all(g.store.device == place for g in layer.groups if g.store.n)
                outs.append(here(out))
        for group in (group for layer in layers for group in layer.groups):
            assert packed or group.pack().nbytes > 0
            assert group.nbytes > 0
    return torch.cat(outs, 2)


def holds(policy: Policy, way: str, calls: Sequence[int], lane: Device) -> None:
    """On the device as on the CPU, without waiting but for AdaKV's counts after a prompt."""
    packed, fast, _ = WAYS[way]
    got = run(policy, packed, fast, calls, lane)
    most = int(policy.budgets.kind == "adakv" and policy.trigger == "prompt")
    assert lane.waits.total() <= most, (lane.waits, policy.to_json())
    want = run(policy, packed, fast, calls, None)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), policy.to_json()


def small(name: str) -> Policy:
    """A method with so few slots that it evicts."""
    for slots in (76, 132, 200):
        with suppress(PolicyError):
            return at(name, replace(SETTING, budget_bytes=SHAPE.budget_bytes(slots)))
    raise AssertionError(name)


SMALL = {name: small(name) for name in METHODS}
MODEL = {"rereading", "hidden"}  # needs of rules that a layer alone cannot serve
NAMES = covering({n: p for n, p in SMALL.items() if p.rule is None or not p.rule.needs & MODEL})


def calls_of(policy: Policy, way: str) -> list[int]:
    """A prompt, and tokens up to the next compaction and some more.

    A policy that evicts nothing and compacts at every token does the same at each of them.
    """
    first = PROMPT if policy.evicts or policy.interval > 1 else 24
    more = min(T - PROMPT, max(12, policy.interval + 4))
    return [first, *[1] * more] if way == "deployed" else [first, more]


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for i, name in enumerate(NAMES) for way in WAYS if way == "deployed" or i < 10],
)  # the first cover most; what the others add is a format or a rule, by which no way differs
def test_methods_run_on_another_device_and_never_wait(name: str, way: str, lane: Device) -> None:
    holds(small(name), way, calls_of(small(name), way), lane)


@pytest.mark.parametrize("name", [n for n, r in RULES.items() if issubclass(r, Attention)])
def test_sums_that_are_divided_on_a_device_are_ranks_of_their_rule(name: str, lane: Device) -> None:
    policy = Policy(slots=40, interval=8, sinks=2, recent_window=8, rule=RULES[name](beta=1))  # type: ignore[call-arg]
    holds(policy, "deployed", calls_of(policy, "deployed"), lane)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_random_policies_run_on_another_device_and_never_wait(way: str, lane: Device) -> None:
    calls = [32, 14] if way != "deployed" else [32, *[1] * 6]  # the least has 28 slots
    for policy in policies(40, SHAPE):
        if not policy.rereads and policy.budgets.kind != "adakv":  # which waits
            holds(policy, way, calls, lane)


def test_a_text_is_attended_at_once_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that only count: one launch, two where keys turn, and what blocks give."""
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    monkeypatch.setattr(lifetimes, "BLOCK", 16)  # so that blocks would be many launches
    device, seen = Device(), Counter[int]()
    shape = replace(SHAPE, head_dim=64)  # which kernels take
    named = [small(name) for name, method in METHODS.items() if method.baseline]
    drawn = policies(60, shape)
    moved = [p.model_copy(update={"positions": "cache"}) for p in drawn if p.anchors is None]
    for policy in filter(plans.applies, [*named, *drawn, *moved]):
        turns = policy.drops and policy.positions == "cache"
        layers = [x for x in layout(policy, shape).layers if x.layer == 1]
        before = Counter(device.launches)
        with kernels(device):
            got = run(policy, False, True, [PROMPT, 60], device, shape)
        assert not device.waits
        launched = (device.launches - before)["triton::attend"]
        assert launched <= 2 * (1 + turns) * len(layers), policy.to_json()  # for each call
        want = run(policy, False, True, [PROMPT, 60], None, shape)
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4), policy.to_json()
        seen[turns] += launched > 0
    assert seen[True] > 5
    assert seen[False] > 5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", [Attention(), RULES["keydiff"]()])
def test_adakv_waits_for_shares_once_a_compaction(rule: Rule, way: str, lane: Device) -> None:
    """How many slots a head keeps is found by the device, and the host makes tensors of so many."""
    policy, (packed, fast, calls) = SHARED.model_copy(update={"rule": rule}), WAYS[way]
    got = run(policy, packed, fast, calls, lane)
    assert lane.waits == {"aten::_to_copy": len(range(40, T, 8))}
    assert torch.allclose(got, run(policy, packed, fast, calls, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES[:5])
def test_each_layer_is_held_where_its_layer_is(name: str, lane: Device) -> None:
    """Layers of one model on two devices: what they share is copied, nothing else crosses."""
    policy, calls = small(name), [PROMPT, *[1] * 20]
    places = [torch.device("meta", i) for i in range(2)]
    found = run(policy, True, True, calls, lane, places=places)
    assert not lane.waits, lane.waits
    assert torch.allclose(found, run(policy, True, True, calls, None, places=places), atol=1e-4)


@pytest.mark.parametrize("name", ["kvpruner-l1-50", "kvpruner-taylor-20"])
def test_which_channels_stay_is_copied_to_a_layer_once(name: str, lane: Device) -> None:
    """They are numbers of the host, which would wait for a copy at every token."""
    policy = small(name)
    view = next(
        x
        for x in (View(policy, i, SHAPE.head_dim) for i in range(SHAPE.layers))
        if x.keys is not None or x.values is not None
    )
    waits = []
    with torch.inference_mode(), lane:
        for m in (PROMPT, 1, 1):
            q, k, v = (tagged(torch.randn(1, h, m, SHAPE.head_dim)) for h in (6, 2, 2))
            out = view.kept(q, k, v)[2].repeat_interleave(3, 1)
            view.whole(out, SHAPE.head_dim)
            waits.append(lane.waits.total())
    assert waits[0] == waits[-1] <= 2


def test_the_lane_sees_tensors_of_two_devices(lane: Device) -> None:
    one, other = (tagged(torch.ones(3), torch.device("meta", i)) for i in range(2))
    with lane, pytest.raises(RuntimeError, match="two devices"):
        one + other


@pytest.mark.parametrize(("way", "waits"), [({}, 1), ({"non_blocking": True}, 0)])
def test_the_lane_sees_a_copy_from_memory_that_may_move(
    way: dict[str, bool], waits: int, lane: Device
) -> None:
    with lane:
        torch.ones(3).to(tagged(torch.ones(1)).device, **way)
    assert lane.waits.total() == waits


def test_the_lane_sees_a_wait(lane: Device) -> None:
    with lane:
        assert bool(tagged(torch.ones(3)).sum() > 0)
    assert lane.waits
