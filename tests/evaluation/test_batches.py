"""Windows that share a forward pass on a GPU: as many as fit, and fewer where they do not."""

from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.errors import OutOfMemory
from kvsearch.evaluation.batches import MOST, SHARE, Batches
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.head import Head
from kvsearch.policy import Policy
from kvsearch.rules import Attention
from tests.cache_cases import tiny
from tests.command import call

LOADED = tiny(dtype=torch.float32)
IDS = np.random.default_rng(0).integers(0, 60, (7, 48))
POLICY = Policy(slots=24, interval=8, sinks=2, recent_window=8, rule=Attention())


KINDS = [  # what a device without memory raises
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


@pytest.fixture
def kind() -> Exception:
    return KINDS[0]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, kind: Exception) -> list[int]:
    """Windows of each pass on a device with room for three, which says that it has more."""
    tried: list[int] = []
    plain = Head.hidden

    def hidden(self: Head, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        tried.append(len(ids))
        if len(ids) > 3:
            raise kind
        return plain(self, ids, cache)

    monkeypatch.setattr(Head, "hidden", hidden)
    monkeypatch.setattr(Batches, "_free", lambda self: 1 << 40)
    return tried


@pytest.mark.parametrize("kind", KINDS, ids=lambda e: str(e)[:24])
def test_a_pass_that_does_not_fit_is_made_again_with_fewer_windows(passes: list[int]) -> None:
    evaluator = Evaluator(LOADED)
    found = evaluator.quality(POLICY, IDS).nll
    assert passes == [7, 3, 3, 1]
    np.testing.assert_allclose(
        found, Evaluator(LOADED, batch=1).quality(POLICY, IDS).nll, atol=1e-5
    )
    passes.clear()
    evaluator.quality(POLICY, IDS)
    assert passes == [3, 3, 1]  # it is remembered


@pytest.mark.parametrize("kind", KINDS, ids=lambda e: str(e)[:24])
def test_a_device_that_the_model_fills_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: Exception
) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise kind

    monkeypatch.setattr(LOADED.model, "forward", forward)
    with pytest.raises(OutOfMemory, match="no memory left beside the model"):
        Evaluator(LOADED)


def test_a_number_that_was_asked_for_is_kept(passes: list[int]) -> None:
    with pytest.raises(OutOfMemory, match="lower --context or --batch"):
        Evaluator(LOADED, batch=4).quality(POLICY, IDS)
    assert passes == [4]


def test_memory_that_a_cpu_lacks_is_one_sentence_and_other_errors_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you ..."
    for text, kind in ((said, OutOfMemory), ("mat1 and mat2 cannot be multiplied", RuntimeError)):

        def hidden(*_: Any, text: str = text) -> torch.Tensor:
            raise RuntimeError(text)

        monkeypatch.setattr(Head, "hidden", hidden)
        with pytest.raises(kind, match="lower --context" if kind is OutOfMemory else "mat1"):
            Evaluator(LOADED, batch=1).quality(POLICY, IDS)


def test_as_many_windows_as_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(LOADED)
    assert batches.size(7, 48) == 1  # a CPU
    one = batches.window_bytes(48)
    for free, fit in ((0.5, 1), (2.5, 2), (7.9, 7), (1e9, min(9, MOST))):
        monkeypatch.setattr(Batches, "_free", lambda self, free=free: int(free * one / SHARE) + 1)
        assert batches.size(9, 48) == fit
    assert batches.window_bytes(96) > 1.9 * one


def test_no_windows_are_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(["eval", "full", "--batch", "0", "--tokens", "64"], capsys)
    assert code == 2 and "--batch must be at least 1 window" in err
