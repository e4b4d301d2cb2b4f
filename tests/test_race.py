"""Evaluating in rungs, and stopping what is certainly behind."""

import numpy as np
import pytest

from kvsearch.evaluate.quality import Evaluator
from kvsearch.evaluate.replay import continues
from kvsearch.knobs import Setting
from kvsearch.methods import at
from kvsearch.models.load import load_model
from kvsearch.search import race
from kvsearch.search.model_work import ModelSession
from kvsearch.search.work import Job


@pytest.mark.parametrize("name", ["h2o+int4", "xmu", "h2o", "window+int4", "tova", "lacache"])
def test_a_replay_that_stops_on_the_way_is_the_same_replay(name: str, tiny_folder) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", announce=lambda _: None)
    loaded.model.double()  # in fp32 a value on the boundary of two codes may fall on either side
    evaluator = Evaluator(loaded, batch=2)
    policy = at(name, Setting(loaded.shape, loaded.shape.budget_bytes(150), 320))
    ids = np.random.default_rng(0).integers(0, 256, size=(3, 320))
    whole = evaluator.quality(policy, ids).nll
    replay = evaluator.replay(policy, ids)
    for stop, windows in ((100, 2), (101, 2), (320, 2), (260, 3), (320, 3)):
        part = replay.to(stop, windows)
        assert part.shape == (windows, stop - 1)
        np.testing.assert_allclose(part, whole[:windows, : stop - 1], atol=1e-5)
    if continues(policy):
        assert replay.spent == ids.size  # every token was paid for once


def test_a_session_evaluates_the_windows_of_a_rung_and_no_more(tiny_folder) -> None:
    loaded = load_model(str(tiny_folder), device="cpu", announce=lambda _: None)
    ids = np.random.default_rng(0).integers(0, 256, size=(3, 200))
    session = ModelSession(Evaluator(loaded), {"search": ids})
    policy = at("h2o", Setting(loaded.shape, loaded.shape.budget_bytes(80), 200))
    paid = []
    for windows, stop in ((1, 100), (1, 200), (2, 200), (None, 200)):
        found = session.run(Job(0, "search", policy, stop, windows))
        assert found.nll.shape == (windows or 3, stop - 1)
        paid.append(found.tokens)
    assert paid == [100, 100, 200, 200]


def noise(offset: float, seed: int, windows: int = 1, tokens: int = 2047) -> np.ndarray:
    """NLL with common difficulty and noise of its own."""
    common = np.random.default_rng(99).gamma(2.0, 1.5, size=(windows, tokens))
    own = 0.2 * np.random.default_rng(seed).standard_normal((windows, tokens))
    return (common + own + offset).astype(np.float32)


def test_only_what_is_certainly_behind_is_stopped() -> None:
    rival = race.Rival("best", noise(0.0, 1, windows=2))
    others = [race.Rival(f"worse {i}", noise(0.3, 10 + i, windows=2)) for i in range(3)]
    for offset, stopped in ((0.2, True), (0.002, False), (-0.2, False)):
        mine = noise(offset, 2, windows=2)[:1]
        assert (race.verdict(mine, [*others, rival], score_from=64) is not None) is stopped
    said = race.verdict(noise(0.2, 2, windows=2)[:1], [*others, rival], score_from=64)
    assert said is not None and "behind best" in said and "1 window of 2048 tokens" in said
    assert race.verdict(noise(0.2, 2), [], score_from=64) is None
    assert race.verdict(noise(9.0, 2)[:, :200], [rival], score_from=64) is None  # too few tokens


def test_more_rivals_make_a_look_more_careful() -> None:
    rival = race.Rival("best", noise(0.0, 1))
    same = [race.Rival("best", rival.nll) for _ in range(1000)]
    offsets = np.linspace(0.0, 0.1, 21)
    stops = [
        [race.verdict(noise(o, 2), rivals, score_from=64) is not None for o in offsets]
        for rivals in ([rival], same)
    ]
    assert 0 < sum(stops[1]) < sum(stops[0])


def test_false_stops_are_as_rare_as_promised() -> None:
    stops = 0
    for number in range(300):
        mine, *others = (noise(0.0, 1000 + 7 * number + i) for i in range(7))
        rivals = [race.Rival(f"equal {i}", nll) for i, nll in enumerate(others)]
        stops += race.verdict(mine, rivals, score_from=64) is not None
    assert stops <= 3


def test_looks_come_after_whole_windows() -> None:
    assert race.rungs(4096) == ((1, 4096),)
    assert race.rungs(4096, 5) == ((1, 4096), (2, 4096), (4, 4096), (5, 4096))
    assert race.rungs(1024, 4, together=4) == ((4, 1024),)
    assert race.rungs(1024, 3, together=2) == ((2, 1024), (3, 1024))
