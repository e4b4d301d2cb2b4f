"""Recording of CUDA graphs, with a stand-in for torch: memory is shared, failures end well."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kvsearch.cache.cuda import captures


def capture(step: Callable[[], object]) -> Callable[[], None]:
    """Carry out `step`, and return what repeats its launches."""
    with captures.aside() as record:
        step()
        return record(step)


class Graphs:
    """What torch is asked for; recordings of `bad` numbers end in an error."""

    def __init__(self, patch: pytest.MonkeyPatch, bad: tuple[int, ...] = ()) -> None:
        self.begun: list[object] = []  # pools, None for one of its own
        self.asked: list[object] = []
        self.waits: list[tuple[str, str, int]] = []  # who waits for whom, after so much was asked
        self.recording = False
        mine = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                # what torch keeps for all graphs is made with the first, which has its own pool
                assert pool is not None or not torch.is_inference_mode_enabled()
                self.number, mine.recording = len(mine.begun), True
                mine.begun.append(pool)

            def capture_end(self) -> None:
                mine.recording = False
                if self.number in bad:
                    raise RuntimeError("operation failed due to a previous error")

            def pool(self) -> object:
                return "pool", self.number

            def replay(self) -> None:
                mine.asked.append(("replay", self.number))

        def stream(name: str) -> SimpleNamespace:
            return SimpleNamespace(
                device_index=3, cuda_stream=0, name=name,
                wait_stream=lambda other: mine.waits.append((name, other.name, len(mine.asked))),
            )  # fmt: skip

        now, side = stream("now"), stream("side")
        patch.setattr(captures, "_mine", SimpleNamespace())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "Stream", lambda: side)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda: now)
        patch.setattr(torch.cuda, "current_device", lambda: 3)
        patch.setattr(torch.cuda, "empty_cache", lambda: mine.asked.append("empty"))
        patch.setattr(torch, "zeros", lambda *_, **__: None)
        patch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda *given: mine.asked.append(given),
            raising=False,
        )  # fmt: skip

    def step(self, *faults: Exception) -> Callable[[], None]:
        """What raises `faults`, one a recording, and what it does is noted."""
        left = list(faults)

        def step() -> None:
            self.asked.append("recorded" if self.recording else "done")
            if self.recording and left:
                raise left.pop(0)

        return step


def test_captures_share_memory_and_carry_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one with a pool of its own would keep memory for ever. Streams wait for each other."""
    graphs = Graphs(monkeypatch)
    with torch.inference_mode():
        for _ in range(3):
            capture(graphs.step())()
    assert graphs.begun == [None, *[("pool", 0)] * 3]
    assert graphs.asked[:3] == ["done", "recorded", ("replay", 1)]
    assert graphs.waits[:2] == [("side", "now", 0), ("now", "side", 2)]


def test_torch_gives_memory_back_before_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    capture(graphs.step(torch.cuda.OutOfMemoryError("none left")))()
    assert graphs.asked == ["done", "recorded", "empty", "recorded", ("replay", 2)]
    lack = [torch.cuda.OutOfMemoryError("none left") for _ in range(2)]
    with pytest.raises(captures.NotCaptured, match="none left") as caught:
        capture(graphs.step(*lack))
    assert caught.value.__cause__ is lack[1]


def test_a_recording_that_fails_says_what_failed_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of a recording fails too, with a reason that says nothing; another one follows."""
    graphs = Graphs(monkeypatch, bad=(1,))
    with pytest.raises(captures.NotCaptured, match=r"^item\(\) waits$"):
        capture(graphs.step(RuntimeError("item() waits\nmore")))
    assert graphs.waits[-1][:2] == ("now", "side")
    assert graphs.asked == ["done", "recorded", (3, ("pool", 0))]
    assert graphs.begun == [None, ("pool", 0), None]
    capture(graphs.step())
    assert graphs.begun[3:] == [None, ("pool", 3)]


def test_what_is_carried_out_may_fail_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)

    def step() -> None:
        raise ValueError("no such slot")

    with pytest.raises(ValueError, match="no such slot"):
        capture(step)
    assert not graphs.begun
