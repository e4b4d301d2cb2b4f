"""Splitting by marginal loss finds the optimum of convex curves, and keeps to the total."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsearch.policy_space.marginal import Split, choose, hull

loss = st.floats(0, 10)


@given(st.lists(st.lists(loss, min_size=4, max_size=4), min_size=1, max_size=3), st.data())
def test_no_exchange_of_a_slot_between_heads_gains_on_convex_curves(curves, data) -> None:
    sizes = [8, 16, 24, 32]
    falling = [sorted(c, reverse=True) for c in curves]
    steps = [sorted(np.diff(c)) for c in falling]  # the steepest first: convex
    convex = [np.cumsum([c[0], *s]) for c, s in zip(falling, steps, strict=True)]
    total = data.draw(st.integers(8 * len(convex), 32 * len(convex)))
    got = Split(sizes, convex).at(total)
    assert got.sum() == np.float64(total) or abs(got.sum() - total) < 1e-6
    assert (got >= 8 - 1e-9).all()

    def lost(at) -> float:
        return sum(float(np.interp(x, sizes, c)) for x, c in zip(at, convex, strict=True))

    for a, b in itertools.permutations(range(len(got)), 2):
        moved = got.copy()
        moved[a], moved[b] = got[a] + 1, got[b] - 1
        if moved[b] >= 8:
            assert lost(moved) >= lost(got) - 1e-6


def test_the_hull_skips_what_lies_above_it_and_ends_at_the_lowest() -> None:
    assert hull([1, 2, 3, 4, 5], [9, 8, 2, 1, 1]) == [0, 2, 3]


def test_a_choice_spends_at_most_the_total_and_starts_with_what_saves_most() -> None:
    costs = [[4, 8], [4, 8], [4, 8]]
    losses = [[1.0, 0.9], [5.0, 0.0], [3.0, 0.0]]
    assert choose(losses, costs, 12) == [0, 0, 0]
    assert choose(losses, costs, 16) == [0, 1, 0]
    assert choose(losses, costs, 20) == [0, 1, 1]
    assert choose(losses, costs, 99) == [1, 1, 1]
