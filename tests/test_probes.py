"""Sensitivity in parts: over evaluators it is what one process measures, whoever is killed."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvsearch.app.sensitivity import spread
from kvsearch.evaluate import head_losses, sensitivity
from kvsearch.evaluate.probes import Lost, Probe, Prober
from kvsearch.evaluate.quality import Evaluator
from kvsearch.models.load import load_model
from kvsearch.search.executors.inline import Inline
from kvsearch.search.executors.processes import Processes
from kvsearch.search.model_work import ModelSession, ModelWork
from kvsearch.search.probing import over
from kvsearch.search.work import Job, ProbeJob, Unusable

IDS = np.random.default_rng(0).integers(0, 256, (2, 160))


class Watched(Processes):
    """Notes what it submits, and kills an evaluator that has the n-th job."""

    def __init__(self, work: ModelWork, slots: int, fatal: int) -> None:
        super().__init__(work, slots)
        self.fatal, self.asked = fatal, Counter[int]()

    def submit(self, slot: int, job: Job | ProbeJob) -> None:
        super().submit(slot, job)
        self.asked[job.key] += 1
        if self.asked.total() == self.fatal:
            assert self._children[slot].opened
            os.kill(self._children[slot].process.pid, signal.SIGKILL)


@pytest.fixture
def evaluator(tiny_folder: Path) -> Evaluator:
    return Evaluator(load_model(str(tiny_folder), device="cpu"))


@pytest.fixture
def work(tiny_folder: Path) -> ModelWork:
    return ModelWork(str(tiny_folder), "float32", ("cpu",), {"sensitivity": IDS}, threads=1)


@pytest.fixture
def two(work: ModelWork) -> Iterator[Watched]:
    executor = Watched(work, 2, fatal=4)
    yield executor
    executor.close()


@pytest.mark.slow
def test_two_evaluators_measure_what_one_does_even_if_one_is_killed(
    evaluator: Evaluator, work: ModelWork, two: Watched
) -> None:
    alone = sensitivity.divergences(evaluator, IDS, [[0], [1]])
    heads = head_losses.measure(evaluator, IDS[0], 4)
    inline = over(Inline(work.open(0)), "sensitivity")
    assert sensitivity.divergences(evaluator, IDS, [[0], [1]], ask=inline) == alone
    assert head_losses.measure(evaluator, IDS[0], 4, ask=inline) == heads
    ask = over(two, "sensitivity")
    np.testing.assert_allclose(
        sensitivity.divergences(evaluator, IDS, [[0], [1]], ask=ask), alone, rtol=1e-5
    )
    assert two.asked.total() == 4 + 1  # a part each, and the one that was killed
    split = head_losses.measure(evaluator, IDS[0], 4, ask=ask)
    np.testing.assert_allclose(split.slots, heads.slots, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(split.keys, heads.keys, rtol=1e-5, atol=1e-9)
    assert two.asked.total() == 5 + 2 + 4  # layers that are estimated, heads that are measured
    both = spread(evaluator, two, "sensitivity", IDS)  # on a CPU the estimates stay here
    again = head_losses.measure(evaluator, IDS[0], 4, ask=both)
    np.testing.assert_allclose(again.slots, heads.slots, rtol=1e-5, atol=1e-9)
    assert two.asked.total() == 11 + 4
    sensitivity.divergences(evaluator, IDS, [[0], [1]], ask=both)  # the driver's model stays here
    again = head_losses.measure(evaluator, IDS[0], 4, ask=both)
    np.testing.assert_allclose(again.slots, heads.slots, rtol=1e-5, atol=1e-9)


def test_an_evaluator_begins_once_per_window_and_frees_it(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    usual = evaluator.divergence
    monkeypatch.setattr(evaluator, "divergence", lambda ids: begun.append(1) or usual(ids))
    prober, policy = Prober(evaluator), sensitivity.starving([1], 2, 32, 160)
    probes = [Probe(window, 160, Lost(policy, 1, first)) for window in (0, 1) for first in (32, 64)]
    found = [float(prober.answer(IDS, probe)) for probe in probes]
    assert len(begun) == 2 and len({*found}) == 4 and min(found) > 0
    prober.forget()
    assert float(prober.answer(IDS, probes[0])) == found[0] and len(begun) == 3


class Refuses:
    """An evaluator on two GPUs, which only says where it is."""

    loaded = SimpleNamespace(devices="cuda:0,cuda:1")


@pytest.mark.parametrize("call", ["synchronize", "empty_cache"])
def test_what_cuda_says_after_a_failure_tells_whether_the_next_policy_can_run(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    said: list[Exception] = []

    def refuse(*_: object) -> None:
        if said:
            raise said[0]

    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: waited.append("emptied"))
    session = ModelSession(cast(Any, Refuses()), {})
    session.forget()
    assert waited == ["cuda:0", "cuda:1", "emptied"]
    monkeypatch.setattr(torch.cuda, call, refuse)
    said.append(torch.AcceleratorError("CUDA error: out of memory"))
    session.forget()  # another job may fit
    said[0] = torch.AcceleratorError("CUDA error: an illegal memory access\nIt may be late")
    with pytest.raises(Unusable, match=r"^CUDA error: an illegal memory access$"):
        session.forget()
