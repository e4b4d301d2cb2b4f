"""The front and its area against their definitions, counted the slow way."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvsearch.results.pareto import front, hypervolume, nondominated

small = st.integers(min_value=0, max_value=7)
clouds = st.lists(st.tuples(small, small), max_size=20)


def dominates(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return a[0] <= b[0] and a[1] <= b[1] and a != b


@given(clouds)
def test_front_is_what_nothing_dominates(points):
    kept = front(points)
    wanted = {
        i
        for i, p in enumerate(points)
        if not any(dominates(q, p) for q in points) and p not in points[:i]
    }
    assert set(kept) == wanted
    assert [points[i][0] for i in kept] == sorted(points[i][0] for i in kept)


@given(clouds, st.tuples(small, small))
def test_hypervolume_counts_unit_squares(points, reference):
    squares = sum(
        any(p[0] <= x and p[1] <= y for p in points)
        for x in range(reference[0])
        for y in range(reference[1])
    )
    assert hypervolume(points, reference) == squares


@given(clouds, st.tuples(small, small))
def test_dominated_points_add_no_area(points, reference):
    kept = [points[i] for i in front(points)]
    assert hypervolume(kept, reference) == hypervolume(points, reference)


def test_nan_is_never_on_the_front_and_infinity_may_be():
    points = [(math.nan, 0.0), (1.0, math.nan), (1.0, math.inf), (math.inf, 1.0)]
    assert front(points) == [2, 3]
    assert hypervolume(points, (2.0, 2.0)) == 0.0


@given(clouds)
def test_in_two_dimensions_both_ways_to_a_front_agree(points):
    assert sorted(front(points)) == (nondominated(points) if points else [])


def test_a_third_dimension_keeps_what_is_best_there():
    assert nondominated([(1, 1, 1), (1, 1, 0), (2, 0, 1), (2, 2, 2)]) == [1, 2]
