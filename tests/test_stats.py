"""Intervals: paired, blocked, and of the right width."""

import numpy as np
import pytest

from kvsearch.stats import blocks, interval, paired, standard_error


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        noise = rng.normal(size=(2, 1024))
        smooth = np.cumsum(noise, 1) - np.cumsum(np.pad(noise, ((0, 0), (16, 0)))[:, :1024], 1)
        found = interval(smooth, resamples=400)  # neighbours are correlated over 16 tokens
        covered += found.lo <= 0 <= found.hi
    assert covered >= 0.86 * 200


def test_independent_tokens_would_be_too_sure() -> None:
    runs = np.repeat(np.random.default_rng(2).normal(size=(1, 64)), 32, axis=1)
    assert standard_error(runs) > 3 * runs.std() / np.sqrt(runs.size)


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(3)
    text = rng.normal(3, 3, size=(1, 2048))
    a, b = text + 0.05 + rng.normal(0, 0.1, text.shape), text
    d = paired(a, b)
    assert 0.04 < d.lo < d.mean < d.hi < 0.06
    with pytest.raises(ValueError, match="same windows and tokens"):
        paired(a, b[:, 1:])


def test_sums_over_blocks_say_what_the_tokens_say() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.exponential(3, size=(2, 3, 1000)).astype(np.float32)  # the last block is shorter
    kept, other = blocks(a), blocks(b)
    assert kept.size == a.size and kept.mean() == pytest.approx(a.mean(dtype=np.float64))
    for block in (64, 256):
        assert standard_error(kept, block) == pytest.approx(standard_error(a, block), rel=1e-12)
        assert paired(kept, other, block=block) == pytest.approx(paired(a, b, block=block))
    with pytest.raises(ValueError, match="cannot be put into 96"):
        blocks(kept, 96)
