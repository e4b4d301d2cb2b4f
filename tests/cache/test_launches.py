"""Launches of one layer on a GPU, held to `kernels/launches.json`: what a change may not add to.

Counted in the device lane, where no GPU is needed (`tests/launches.py`). KVSEARCH_WRITE_LAUNCHES=1
writes the table. What waits for the device fails in `tests/cache/test_device.py`.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvsearch.cache.by_age.plans import forget_plans
from kvsearch.cache.by_segment import segments
from kvsearch.cache.layer import Layer
from kvsearch.cache.model.anchors import Stream
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.ways import advance
from kvsearch.errors import PolicyError
from kvsearch.policy import Budgets, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.policy.anchors import Anchors
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.rules import Attention
from tests.heads import losses
from tests.importance import importance
from tests.launches import kernels
from tests.tagged import Device, here, tagged

pytest.importorskip("triton", reason="triton is not installed")
FILE = Path(__file__).parents[2] / "kernels" / "launches.json"
SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=64, heads=6)
KINDS = {"rotated+heads, 8 kinds": replace(SHAPE, kv_heads=8, heads=24)}  # no two KV heads alike
PROMPT, STEPS = 330, 140  # twice the longest interval, and some
TURNED = "window+int4, positions cache"
OWN = {
    "h2o+int4, AdaKV": Policy(
        slots=76, interval=16, sinks=4, recent_window=16, rule=Attention(),
        tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=32),
        budgets=Budgets(kind="adakv"),
    ),
}  # fmt: skip
NAMES = (
    *("full", "int4", "kivi4", "window+int4", "streamingllm", "lacache", "h2o", "h2o+int4", "xmu"),
    *("rotated+heads", "expected-attention", "anllm-ep"),
)
MAKES = ("aten::empty", "aten::new_empty", "aten::empty_like")  # memory, no launch
QUICK = ("full", "int4", "window+int4", "h2o+int4", "xmu", "anllm-ep", TURNED)
WRITE = os.environ.get("KVSEARCH_WRITE_LAUNCHES") == "1"


def small(name: str, shape: ModelShape = SHAPE) -> Policy:
    """A method that evicts after the prompt."""
    for slots in (76, 132, 200):
        with suppress(PolicyError):
            setting = Setting(
                shape, shape.budget_bytes(slots), PROMPT + STEPS,
                prompt=PROMPT, importance=importance(shape), heads=losses(shape),
            )  # fmt: skip
            return at(name, setting)
    raise AssertionError(name)


def calls(
    layer: Layer, sizes: list[int], device: Device, shape: ModelShape = SHAPE
) -> Iterator[tuple[bool, Counter[str]]]:
    """Feed so many fp16 tokens a call; whether slots left or moved, and what was launched."""
    draw = torch.Generator().manual_seed(0)
    for m in sizes:
        held = [g.store.n for g in layer.groups]
        q, k, v = (
            tagged(torch.randn(1, heads, m, shape.head_dim, generator=draw).half())
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        before = Counter(device.launches)
        advance(layer, q, k, v, scale=0.2)
        compacts = any(
            g.store.n != n + m or g.store.residual == 0
            for g, n in zip(layer.groups, held, strict=True)
        )
        yield compacts, device.launches - before


def stream(policy: Policy) -> Stream | None:
    """A text of sequences of 11 tokens, for a policy with anchors."""
    if policy.anchors is None:
        return None
    found = Stream(lambda ids, first: (np.arange(ids.shape[1])[None] + first) % 11 == 3)
    found.update(torch.zeros(1, PROMPT + max(STEPS, 2 * (policy.interval or 0))), 0)
    return found


def counts(name: str) -> dict[str, int]:
    """Most launches of layer 1: of a decoded token without and with a compaction, of a prompt."""
    device, found = Device(), dict[str, int]()
    shape = KINDS.get(name, SHAPE)
    policy = OWN.get(name) or small(name.partition(",")[0], shape)
    if name == TURNED:
        policy = policy.model_copy(update={"positions": "cache"})
    parts = [part for part in layout(policy, shape).layers if part.layer == 1]
    kinds = {"rotated+heads": SHAPE.kv_heads} | {k: x.kv_heads for k, x in KINDS.items()}
    assert len(parts) == (2 if name in OWN else kinds.get(name, 1))
    # tokens; a cache that grows has further tables now and then
    steps = STEPS if policy.slots is None else max(40, 2 * policy.interval + 12)
    with kernels(device) as made, torch.inference_mode(), device:
        rotary = Rotary(tagged(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
        layer = Layer(policy, parts, packed=True, rotary=rotary, stream=stream(policy))
        for i, (compacts, ran) in enumerate(calls(layer, [PROMPT, *[1] * steps], device, shape)):
            if i < steps // 2:  # tables are made, and kernels compiled, once
                warm = {k: len(kernel.variants) for k, kernel in made.items()}
                continue
            what = "compaction" if compacts else "step"
            number = sum(n for op, n in ran.items() if op not in MAKES)
            triton = sum(n for op, n in ran.items() if op.startswith("triton::"))
            found[what] = max(found.get(what, 0), number)
            found[f"{what}, Triton"] = max(found.get(f"{what}, Triton", 0), triton)
        found["compiled later"] = max(len(made[k].variants) - n for k, n in warm.items())
    forget_plans()
    with kernels(device), torch.inference_mode(), device:
        rotary = Rotary(tagged(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
        more = 2 * policy.interval  # the last layer's text is longer by two intervals
        for what, tokens in (
            ("evaluation", PROMPT), ("evaluation, next layer", PROMPT), ("longer", PROMPT + more)
        ):  # fmt: skip
            layer = Layer(policy, parts, packed=False, rotary=rotary, stream=stream(policy))
            ((_, ran),) = calls(layer, [tokens], device, shape)
            found[what] = sum(n for op, n in ran.items() if op not in MAKES)
        if policy.active_rule is not None:
            again = found["evaluation, next layer"]
            found["evaluation, a compaction"] = (found["longer"] - again + 1) // 2
        del found["longer"]
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
     for name in (*NAMES, *KINDS, *OWN, TURNED)],
)  # fmt: skip
def test_a_layer_launches_no_more_than_its_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    # it is emptied when it is full, in the middle of a count if other tests have filled it
    monkeypatch.setattr(segments, "_weights", {})
    found = counts(name)
    if WRITE:
        table = json.loads(FILE.read_text()) if FILE.exists() else {}
        table["unit"] = (
            f"launches of one layer: a decoded token without and with a compaction, one evaluation "
            f"of {PROMPT} tokens, in the first layer and in one like it, and what an interval with "
            f"its compaction adds to that"
        )
        table.setdefault("methods", {})[name] = found
        table["methods"] = dict(sorted(table["methods"].items()))
        rows = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in table["methods"].items()
        )
        unit = json.dumps(table["unit"])
        FILE.write_text(f'{{\n "unit": {unit},\n "methods": {{\n{rows}\n }}\n}}\n')
        return
    budget = json.loads(FILE.read_text())["methods"][name]
    assert found.keys() == budget.keys()  # a token without a compaction that is gone is no saving
    assert found["evaluation"] > 0  # and counting nothing is none either
    own = found.get("step, Triton", 4)  # of a token's launches with a compaction, its step's
    assert found.get("compaction, Triton", 0) - own <= 2  # whatever the kinds of heads
    if name in KINDS:  # these cost the same, however many kinds of heads there are
        two = json.loads(FILE.read_text())["methods"]["rotated+heads"]
        for what in ("step", "step, Triton", "compaction, Triton"):
            assert found[what] == two[what]
    if name == "full":
        assert found["step, Triton"] == 3  # writing a slot, reading all, joining what was read
        layers, attend = 32, 1  # one launch is the model's own
        every = found["evaluation"] + (layers - 1) * found["evaluation, next layer"]
        assert every - layers * attend <= 60  # at any length: one launch is for all tokens
    more = {k: (n, budget[k]) for k, n in found.items() if n > budget[k]}
    assert not more, f"launches, found and allowed: {more}"


def test_what_slots_receive_from_a_blind_anchor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It attends by other means, to the same sums; here no slot leaves with it."""
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    policy = Policy(
        slots=400,
        interval=24,
        recent_window=40,
        rule=Attention(),
        anchors=Anchors(at="given", ids=(0,), protected=(0, PROMPT + 1)),
    )
    stream = Stream(lambda ids, first: (np.arange(ids.shape[1])[None] + first) % 11 == 2)
    stream.update(torch.zeros(1, PROMPT + 30), 0)
    found, (part, *_) = [], layout(policy, SHAPE).layers
    for lane in (kernels, lambda device: nullcontext()):
        device = Device()
        with lane(device), torch.inference_mode(), device:
            rotary = Rotary(tagged(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
            layer = Layer(policy, [part], packed=True, rotary=rotary, stream=stream)
            list(calls(layer, [PROMPT, *[1] * 20], device))
            sums = layer.groups[0].scorer.sums
        found.append(here(sums).clone())
        assert (device.launches["triton::attend_heads"] > 10) == (lane is kernels)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
