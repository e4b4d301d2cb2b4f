"""Captured turns of evictions: they launch the same, and a replay evicts what a turn does."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from kvsearch.cache import turns
from kvsearch.cache.captures import NotCaptured
from kvsearch.cache.heads import advance
from kvsearch.cache.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.policy import Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention
from tests.tagged import Device, here, tagged
from tests.test_device import SHAPE, small

CPU = torch.device("cpu")
FOUR = (Tier(key_bits=4, value_bits=4),)
POLICIES = {
    "XMU's correction": Policy(slots=60, interval=8, rule=Attention(alpha=1, beta=1)),
    "decay, a recent window in the way": Policy(
        slots=60, interval=4, sinks=3, recent_window=30, tiers=FOUR, quantizer=Quantizer(group=16),
        rule=Attention(alpha=1, beta=1, horizon=32, kind="decay"),
    ),
    "a window of intervals": Policy(
        slots=60, interval=4, rule=Attention(horizon=12, beta=0.5), recent_window=2
    ),
    "smoothed, one vote": Policy(
        slots=60, interval=8, recent_window=8,
        rule=Attention(horizon=8, pool=3, share="layer"),
    ),
    "every token": Policy(slots=60, interval=1, rule=Attention(beta=1)),
}  # fmt: skip
NAMED = ("h2o+int4", "tova", "rotated+heads")


def policy_of(name: str) -> Policy:
    return POLICIES.get(name) or small(name)


def evaluate(policy: Policy, device: Device | None = None, more: int = 0) -> torch.Tensor:
    """Outputs over a text, in one call, that is long enough for turns to be captured, and more."""
    tokens = 2 * (policy.slots or 0) + policy.interval * (turns.LEAST + 4) + more
    draw, put = torch.Generator().manual_seed(0), tagged if device else lambda x: x
    with torch.inference_mode(), device or nullcontext():
        rotary = Rotary(put(torch.linspace(0.1, 1, SHAPE.head_dim // 2)))
        parts = [part for part in layout(policy, SHAPE).layers if part.layer == 1]
        states = [LayerState(part, packed=False, rotary=rotary) for part in parts]
        q, k, v = (
            put(torch.randn(1, heads, tokens, SHAPE.head_dim, generator=draw))
            for heads in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
        )
        return here(advance(states, q, k, v, scale=0.2))


def as_if_captured(patch: pytest.MonkeyPatch, capture: Callable[..., object]) -> None:
    """Turns are captured on any device; what replays them is what `capture` gives."""
    patch.setattr(turns, "serves", lambda device, count: count >= turns.LEAST)
    patch.setattr(turns, "capture", capture)
    patch.setattr("kvsearch.cache.one_by_one.serves", lambda *_: False)


@pytest.mark.parametrize("name", [*POLICIES, *NAMED])
def test_replays_evict_what_turns_evict(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: rows are found, and tokens counted, on the device."""
    replayed = []

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        def again() -> None:
            replayed.append(step)
            step()

        step()
        return again

    monkeypatch.setattr("kvsearch.cache.one_by_one.serves", lambda *_: False)
    want = evaluate(policy_of(name))
    as_if_captured(monkeypatch, capture)
    assert torch.equal(evaluate(policy_of(name)), want)
    assert len(replayed) >= turns.LEAST - turns.WARM


@pytest.mark.parametrize("name", [*POLICIES, *NAMED])
def test_turns_launch_the_same_with_the_same_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a capture of one of them is all of them; in the lane, where launches are noted."""
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    device, captures = Device(), list[list[list[object]]]()

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        traces: list[list[object]] = []
        captures.append(traces)

        def again() -> None:
            device.trace = []
            step()
            traces.append([(op, numbers(given)) for op, given in device.trace])
            device.trace = None

        again()
        return again

    as_if_captured(monkeypatch, capture)
    evaluate(policy_of(name), device)
    assert not device.waits
    assert captures
    for traces in captures:
        assert len(traces) >= turns.LEAST - turns.WARM
        assert len(traces[0]) > 10
        assert all(trace == traces[0] for trace in traces)


def numbers(given: object) -> object:
    """What a launch was given, but for where tensors lie: a replay has memory of its own."""
    if isinstance(given, dict):
        return {k: numbers(x) for k, x in given.items()}
    if not isinstance(given, tuple):
        return given
    if len(given) == 5 and isinstance(given[3], torch.dtype):  # see `tagged._fixed`
        return given[1:]
    return tuple(numbers(x) for x in given)


def test_a_device_is_tried_once_and_only_if_it_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, asked = torch.device("cuda", 7), []
    monkeypatch.setattr(turns, "_proved", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(turns, "same", lambda device: asked.append(device) or True)
    assert not turns.serves(CPU, 1000)
    assert not turns.serves(gpu, turns.LEAST - 1)
    monkeypatch.setenv("KVSEARCH_GRAPHS", "0")
    assert not turns.serves(gpu, 1000)
    monkeypatch.delenv("KVSEARCH_GRAPHS")
    assert not asked
    assert turns.serves(gpu, 1000)
    assert turns.serves(gpu, 1000)
    assert asked == [gpu]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not turns.serves(gpu, 1000)  # captures do not nest
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def breaks(device: torch.device) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def lacks(device: torch.device) -> bool:
        raise NotCaptured("no memory") from torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(turns, "_proved", {})
    for same, served in ((lacks, False), (lambda device: True, True)):
        monkeypatch.setattr(turns, "same", same)
        assert turns.serves(gpu, 1000) is served  # a lack of memory may pass
    for same, reason in ((lambda device: False, "numbers differ"), (breaks, "not permitted")):
        monkeypatch.setattr(turns, "_proved", {})
        monkeypatch.setattr(turns, "same", same)
        with pytest.warns(RuntimeWarning, match=reason):
            assert not turns.serves(gpu, 1000)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not turns.serves(gpu, 1000)


def test_the_trial_sees_a_replay_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def well(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return step

    def once(step: Callable[[], None]) -> Callable[[], None]:
        left = [step]
        step()
        return lambda: left.pop()() if left else None

    def never(step: Callable[[], None]) -> Callable[[], None]:
        step()
        return lambda: None

    for capture, right in ((well, True), (once, False), (never, False)):
        monkeypatch.setattr(turns, "capture", capture)
        assert turns.same(CPU) is right


@pytest.mark.parametrize("memory", [False, True])
def test_a_turn_that_cannot_be_captured_is_launched_by_the_host(
    memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text goes on where it is; after a lack of memory the next one tries again."""

    def capture(step: Callable[[], None]) -> Callable[[], None]:
        step()
        cause = torch.cuda.OutOfMemoryError if memory else RuntimeError
        raise NotCaptured("not permitted") from cause("not permitted")

    policy = policy_of("XMU's correction")
    monkeypatch.setattr("kvsearch.cache.one_by_one.serves", lambda *_: False)
    monkeypatch.setattr(turns, "_proved", {})
    want = evaluate(policy)
    as_if_captured(monkeypatch, capture)
    told = nullcontext() if memory else pytest.warns(RuntimeWarning, match="not permitted")
    with told:
        assert torch.equal(evaluate(policy), want)
    assert turns._proved == ({} if memory else {CPU: False})
    with pytest.raises(NotCaptured):
        turns.same(CPU)
