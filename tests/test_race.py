"""Evaluating in rungs, and stopping what is certainly behind."""

import numpy as np
import pytest

from kvsearch.evaluate.quality import Evaluator
from kvsearch.evaluate.replay import continues
from kvsearch.knobs import Setting
from kvsearch.methods import at
from kvsearch.models.load import load_model
from kvsearch.policy import ModelShape, Policy
from kvsearch.rules import Attention
from kvsearch.search import race
from kvsearch.search.model_work import ModelSession
from kvsearch.search.work import Job

SHAPE = ModelShape(layers=2, kv_heads=2, head_dim=8, heads=4)


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


def noise(offset: float, seed: int, tokens: int = 2047) -> np.ndarray:
    """NLL with common difficulty and noise of its own."""
    common = np.random.default_rng(99).gamma(2.0, 1.5, size=(1, tokens))
    own = 0.2 * np.random.default_rng(seed).standard_normal((1, tokens))
    return (common + own + offset).astype(np.float32)


def test_only_what_is_certainly_behind_is_stopped() -> None:
    early = race.Exposure(first=64, mean=100)
    rival = race.Rival("best", early, noise(0.0, 1))
    prefix = 1024
    for offset, stopped in ((0.2, True), (0.002, False), (-0.2, False)):
        mine = noise(offset, 2)[:, : prefix - 1]
        assert (
            race.verdict(mine, early, [rival], score_from=64, tokens=2048) is not None
        ) is stopped
    said = race.verdict(noise(0.2, 2)[:, : prefix - 1], early, [rival], score_from=64, tokens=2048)
    assert said is not None and "behind best" in said and "1024 tokens" in said


def test_a_rival_that_has_hardly_evicted_stops_no_proposal() -> None:
    late = race.Rival("late", race.Exposure(first=900, mean=900), noise(0.0, 1))
    mine, soon = noise(0.5, 2), race.Exposure(64, 100)
    assert race.verdict(mine[:, :1023], soon, [late], score_from=64, tokens=2048) is None
    assert race.verdict(mine, soon, [late], score_from=64, tokens=2048) is not None  # whole windows
    mine = mine[:, :1023]
    early = race.Rival("early", race.Exposure(64, 100), noise(0.0, 1))
    unexposed = race.Exposure(first=1000, mean=1000)  # too few tokens since its first eviction
    assert race.verdict(mine, unexposed, [early], score_from=64, tokens=2048) is None


def test_false_stops_are_as_rare_as_promised() -> None:
    early = race.Exposure(64, 100)
    rival = race.Rival("equal", early, noise(0.0, 1))
    stops = [
        race.verdict(noise(0.0, seed)[:, :1023], early, [rival], score_from=64, tokens=2048)
        is not None
        for seed in range(2, 202)
    ]
    assert sum(stops) <= 2


def test_exposure_is_where_eviction_starts() -> None:
    assert race.exposure(Policy(), SHAPE).first == float("inf")
    plain = race.exposure(Policy(slots=100, interval=16, rule=Attention()), SHAPE)
    assert plain.first == plain.mean == 96  # target 84: the compaction at 96 is the first above it


def test_parts_of_the_first_windows_come_before_whole_ones() -> None:
    policy = Policy(slots=100)
    assert race.rungs(policy, 4096, 256) == ((1, 1024), (1, 2048), (1, 4096))
    assert race.rungs(policy, 1536, 256) == ((1, 768), (1, 1536))
    whole = ((1, 4096), (2, 4096), (4, 4096), (5, 4096))
    assert race.rungs(policy, 4096, 256, 5) == ((1, 1024), (1, 2048), *whole)
    prompt = Policy(slots=100, trigger="prompt")
    assert race.rungs(prompt, 4096, 256, 5) == whole
    assert race.rungs(policy, 1024, 128, 4, together=4) == ((4, 256), (4, 512), (4, 1024))
    assert race.rungs(policy, 1024, 128, 3, together=2)[-2:] == ((2, 1024), (3, 1024))
