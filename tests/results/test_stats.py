"""Intervals: paired, blocked, and of the right width."""

from dataclasses import astuple
from itertools import product

import numpy as np
import pytest
from scipy.stats import t as student

from kvsearch.results.intervals import (
    Blocks,
    blocks,
    clustered,
    interval,
    long_blocks,
    mcnemar,
    paired,
    spread,
    standard_error,
    through,
    wilson,
    wilson_by_group,
)
from kvsearch.results.student_t import quantile


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    rng, covered = np.random.default_rng(1), 0
    for _ in range(400):
        noise = rng.normal(size=(2, 2048 + 256))
        sums = np.cumsum(noise, 1)  # neighbours are correlated over 256 tokens
        found = interval(sums[:, 256:] - sums[:, :-256])
        covered += found.lo <= 0 <= found.hi
    assert 0.92 * 400 <= covered <= 0.98 * 400


def test_long_blocks_are_equal_parts_of_windows() -> None:
    def found(windows: int, tokens: int) -> tuple[int, list[int]]:
        got = long_blocks(np.zeros((windows, tokens)))
        return got.count, got.tokens.tolist()

    assert found(2, 3840) == (8, [960, 960, 960, 960])
    assert found(8, 1280) == (8, [1280])
    assert found(2, 896) == (4, [448, 448])  # too few windows: at least four blocks
    assert found(1, 1280) == (4, [320, 320, 320, 320])
    assert found(1, 64) == (4, [16, 16, 16, 16])
    assert np.isnan(interval(blocks(np.zeros((1, 64)))).lo)  # kept as one block


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 8, 63, 4001])
def test_quantiles_of_t_are_those_of_scipy(df: int) -> None:
    for level in (0.6, 0.975, 0.9995, 0.9999999):
        assert quantile(level, df) == pytest.approx(student.ppf(level, df), rel=1e-8)
    with pytest.raises(ValueError, match="no quantile"):
        quantile(1.0, df)


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
    for block in (None, 64, 256):
        assert standard_error(kept, block) == pytest.approx(standard_error(a, block), rel=1e-12)
    assert astuple(paired(kept, other)) == pytest.approx(astuple(paired(a, b)))
    with pytest.raises(ValueError, match="cannot be put into 96"):
        blocks(kept, 96)


def test_rows_on_few_windows_are_compared_through_one_that_has_all() -> None:
    """The first four windows are easy; intervals are as wide as few windows make them."""
    rng, tokens = np.random.default_rng(5), np.array([512])
    covered = ahead = 0
    for _ in range(400):
        kept = rng.normal(0, 0.02, size=(3, 16, 1)).cumsum(0)
        kept += np.where(np.arange(16)[:, None] < 4, 0.0, 0.1) * np.array([0, 1, 1])[:, None, None]
        full, middle, short = (Blocks(512 * (2 + x), tokens) for x in kept)
        few = Blocks(short.sums[:4], tokens)
        parts = through(few, middle, full)
        d, direct = interval(*parts), paired(middle, full)
        behind = paired(few, Blocks(middle.sums[:4], tokens))
        assert d.mean == pytest.approx(sum(x.mean() for x in parts), abs=1e-12)
        assert d.mean - direct.mean == pytest.approx(behind.mean, abs=1e-9)
        covered += d.lo <= 0.075 <= d.hi
        ahead += paired(few, Blocks(full.sums[:4], tokens)).hi < 0.075
    assert covered >= 0.95 * 400 and ahead > 0.7 * 400  # without the middle it is off
    (same,) = through(short, middle, full)
    assert (same.sums == short.sums - full.sums).all()
    (itself,) = through(middle, middle)
    assert (itself.sums == middle.sums).all()


def test_differences_of_a_run_lend_each_other_their_variance() -> None:
    rng, size = np.random.default_rng(5), 1024
    true = np.linspace(0.01, 1, 16)  # rows far behind differ by more from window to window
    held, narrower = [], []
    for _ in range(100):
        noise = rng.normal(size=(16, 4)) * (0.3 * true[:, None])
        rows = [Blocks((true[i] + noise[i, :, None]) * size, np.array([size])) for i in range(16)]
        together = spread((x,) for x in rows)
        found = [interval(x, spread=together) for x in rows]
        held += [d.lo <= x <= d.hi for d, x in zip(found, true, strict=True)]
        apart = [interval(x, level=0.999) for x in rows]
        close = [interval(x, level=0.999, spread=together) for x in rows]
        narrower += [(a.hi - a.lo) / (b.hi - b.lo) for a, b in zip(close, apart, strict=True)]
    assert 0.94 < np.mean(held) < 0.98
    assert np.median(narrower) < 0.6
    same = Blocks(np.zeros((4, 1)), np.array([size]))
    assert spread([(same,)] * 9) is None and spread((x,) for x in rows[:3]) is None
    assert interval(same, spread=together).hi == 0  # a policy that does nothing is no guess


def test_mcnemars_test_is_binomial() -> None:
    def single(one: int, other: int) -> float:
        return mcnemar([1] * one + [-1] * other + [0])

    assert [single(0, 5), single(5, 0), single(3, 3), single(0, 0)] == [1 / 16, 1 / 16, 1, 1]
    assert single(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)


def test_mcnemars_test_counts_documents() -> None:
    """Four questions on each of two articles are two observations, not eight."""
    assert mcnemar([4, 4]) == 0.5 and mcnemar([1] * 8) == 2 / 2**8
    gaps = [3, -1, 2, 0, 1, -2]
    sums = [abs(sum(s * g for s, g in zip(signs, gaps, strict=True)))
            for signs in product((1, -1), repeat=len(gaps))]  # fmt: skip
    assert mcnemar(gaps) == np.mean([s >= abs(sum(gaps)) for s in sums])


def test_workloads_that_take_turns_are_strata() -> None:
    """What differs between a text and facts is no uncertainty of their mean."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.01, 0.001, 6), rng.normal(0.5, 0.1, 6)
    turns = np.stack([a, b], 1).reshape(-1, 1)
    names = tuple(f"{kind} {i}" for i in range(6) for kind in "ab")
    found = blocks(turns, groups=names, strata=("a", "b") * 6)
    error = np.hypot(*(x.std(ddof=1) / np.sqrt(6) for x in (a, b))) / 2
    assert standard_error(found) == pytest.approx(error)
    got = interval(found)
    assert found.count == 6 and got.mean == pytest.approx(turns.mean())
    assert got.hi - got.mean == pytest.approx(float(student(5).ppf(0.975)) * error)
    alone = blocks(turns, groups=names)
    assert standard_error(alone) > 1.5 * error  # as one sample it would be wider
    assert found.first(4).strata == ("a", "b", "a", "b")


def test_intervals_count_groups_and_shares_stay_inside() -> None:
    values = np.array([1.0, 1.0, 3.0, 3.0])
    alone = clustered(values, ["a", "b", "c", "d"])
    grouped = clustered(values, ["a", "a", "b", "b"])
    assert alone.mean == grouped.mean == 2 and grouped.hi > alone.hi
    assert alone.hi - 2 == pytest.approx(3.18245 * np.std(values, ddof=1) / 2, rel=1e-4)
    none, all_of = wilson(0, 10), wilson(10, 10)
    assert (none.lo, all_of.hi) == pytest.approx((0, 1)) and none.hi == pytest.approx(
        0.2775, abs=1e-3
    )


def test_a_share_of_asks_is_as_sure_as_its_documents_are_many() -> None:
    hits = [True] * 5 + [False] * 3
    assert astuple(wilson_by_group(hits, list("abcdefgh"))) == pytest.approx(astuple(wilson(5, 8)))
    for n in (8, 5, 0):  # asks of a document have one answer: four of each say what one says
        few = [i < n for i in range(8)]
        found = wilson_by_group(np.repeat(few, 4).tolist(), np.repeat(list("abcdefgh"), 4).tolist())
        assert found.mean == n / 8 and found.hi - found.lo >= wilson(n, 8).hi - wilson(n, 8).lo
        assert found.hi - found.lo <= wilson(n, 8).hi - wilson(n, 8).lo + 0.03
    rng, held = np.random.default_rng(3), 0  # 20 documents with 1 to 6 asks, alike in part
    for _ in range(1000):
        sizes = rng.integers(1, 7, size=20)
        hits = np.repeat(rng.beta(1.4, 0.6, size=20), sizes) > rng.random(sizes.sum())
        found = wilson_by_group(hits.tolist(), np.repeat(np.arange(20).astype(str), sizes).tolist())
        held += found.lo <= 0.7 <= found.hi
    assert 920 <= held <= 970
    alone = wilson_by_group([True, False, True], ["a"] * 3)
    assert alone.hi - alone.lo > wilson(2, 3).hi - wilson(2, 3).lo
