"""Parts of an evaluation, and rows that are certainly behind and measured no further."""

from typing import Any

import numpy as np
import pytest

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import load_model
from kvsearch.policy_search.model_worker import ModelSession
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.results.intervals import blocks, spread
from kvsearch.run.report_windows import behind, looks
from kvsearch.workloads.measured_parts import Part


def test_a_session_evaluates_the_windows_of_a_job_and_no_more(tiny_folder) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", announce=lambda _: None)
    ids = np.random.default_rng(0).integers(0, 256, size=(3, 200))
    session = ModelSession(Evaluator(loaded), {"search": Part.text("search", ids)})
    policy = at("h2o", Setting(loaded.shape, loaded.shape.budget_bytes(80), 200))
    whole = session.run(Job(0, "search", policy))
    assert whole.nll.shape == (3, 199) and whole.tokens == 600
    for first, windows in ((0, 1), (1, 2), (2, 1)):
        found = session.run(Job(0, "search", policy, windows, first=first))
        np.testing.assert_allclose(found.nll, whole.nll[first : first + windows], atol=1e-5)
        assert found.tokens == 200 * windows


def noise(offset: float, seed: int, windows: int = 1, tokens: int = 2047) -> np.ndarray:
    """NLL with common difficulty and noise of its own."""
    common = np.random.default_rng(99).gamma(2.0, 1.5, size=(windows, tokens))
    own = 0.2 * np.random.default_rng(seed).standard_normal((windows, tokens))
    return (common + own + offset).astype(np.float32)


def test_only_what_is_certainly_behind_is_stopped() -> None:
    rival = noise(0.0, 1, windows=2)
    for offset, stopped in ((0.2, True), (0.002, False), (-0.2, False)):
        mine = noise(offset, 2, windows=2)[:1]
        assert (behind(mine, rival, score_from=64, false=0.002) is not None) is stopped
    found = behind(noise(0.2, 2, windows=2), rival, score_from=64, false=0.002)
    assert found is not None and 0 < found.lo < found.mean < found.hi


def test_a_document_of_a_workload_says_nothing_of_its_variance() -> None:
    lost = np.array([[1.0], [2.0], [1.1], [2.1]], np.float32)
    how: dict[str, Any] = {"score_from": 1, "false": 0.1}
    of = ("text", "facts") * 2
    assert behind(lost[:2], 0 * lost[:2], ("a", "b"), of[:2], **how) is None
    found = behind(lost, 0 * lost, ("a", "b", "c", "d"), of, **how)
    assert found is not None and 0 < found.lo < found.mean == pytest.approx(1.55)


def test_false_stops_are_as_rare_as_promised() -> None:
    equal = [(noise(0.0, 2 * i), noise(0.0, 2 * i + 1)) for i in range(1000)]
    stops = sum(behind(a, b, score_from=64, false=0.02) is not None for a, b in equal)
    assert 5 <= stops <= 35


def test_looks_come_after_whole_windows() -> None:
    assert looks(1, 1) == (1,) and looks(4, 4) == (4,)
    assert looks(1, 5) == (1, 2, 4, 5)
    assert looks(2, 3) == (2, 3)


def test_two_documents_stop_what_all_differences_say_is_far_behind() -> None:
    """With two documents, nothing was ever stopped: Student's t has one degree of freedom."""
    gaps = np.array([0.0, 0.0, 0.005, 0.02, 0.05, 0.1, 0.3, 0.5])
    groups, rng, far, equal, alone = ("a", "b"), np.random.default_rng(5), 0, 0, 0
    for _ in range(400):
        own = rng.standard_normal((len(gaps), 2, 1)) * 0.2 * (gaps[:, None, None] + 0.02)
        lost = (gaps[:, None, None] + own).astype(np.float32)
        known = spread([(blocks(x, groups=groups),) for x in lost])
        assert known is not None
        found = [
            behind(x, 0 * x, groups, score_from=1, false=0.002, spread=known) is not None
            for x in lost
        ]
        equal += sum(found[:2])
        far += sum(found[-2:])
        alone += behind(lost[-1], 0 * lost[-1], groups, score_from=1, false=0.002) is not None
    assert equal <= 8 and far >= 250 and alone <= 40
