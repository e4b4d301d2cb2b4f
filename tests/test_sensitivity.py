"""Sensitivity is measured as finely as a search can pay for."""

import pytest

from kvsearch.evaluate.sensitivity import groups_for


@pytest.mark.parametrize(
    ("search_tokens", "layers", "groups"),
    [(34_000, 30, 10), (220_000, 30, 27), (10_000_000, 30, 30), (10_000_000, 4, 4), (0, 4, 4)],
)
def test_groups_cost_at_most_a_tenth_of_a_search_but_never_fall_below_ten(
    search_tokens: int, layers: int, groups: int
) -> None:
    assert groups_for(search_tokens, 768, layers) == groups
