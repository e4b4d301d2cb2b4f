"""Policies compared: the same opponent everywhere, and documents that count as independent."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsearch.results.compare import Comparison, Entry
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks
from kvsearch.results.measurement import Answered, Measurement
from kvsearch.results.records import Kind

KINDS: tuple[Kind, ...] = ("method", "combined", "earlier", "searched")


def losses(values: list[float], groups: list[str] | None = None) -> Blocks:
    return Blocks(np.array(values)[:, None], np.ones(1, dtype=np.int64), tuple(groups or ()))


def items(shares: dict[str, list[float]], exact: dict[str, list[list[bool]]]) -> dict[str, Entry]:
    """Policies on two contexts of each of four articles; the first asks of an article are alike."""
    groups = [f"article {i // 2}" for i in range(8)]
    return {
        name: Entry(
            "full" if name == "full" else "method",
            10,
            losses(values, groups),
            tuple(
                Answered("qa", group, 1.0, hits, [[int(h)] for h in hits])
                for group, hits in zip(groups, exact[name], strict=True)
            ),
        )
        for name, values in shares.items()
    }


def test_contexts_of_one_document_are_one_observation() -> None:
    """A run counted contexts and asks: `qa` asks several times about each of eleven articles."""
    by_article = [0.1, 0.1, 0.3, 0.3, 0.2, 0.2, 0.4, 0.4]
    right = [[h, h] for h in np.repeat([True, False, True, False], 2).tolist()]
    entries = items(
        {"full": [0.0] * 8, "h2o": by_article}, {"full": [[True, True]] * 8, "h2o": right}
    )
    of = Comparison(entries, "full", 10)
    once = Comparison(  # one context of each article: nothing more is known from the second
        {
            n: replace(e, losses=losses([*e.losses.sums[::2, 0]], list("abcd")))
            for n, e in entries.items()
        },
        "full",
        10,
    )
    assert of.error("h2o") == pytest.approx(once.error("h2o")) and of.error("h2o")[1] == 4
    assert of.over_full("h2o").hi == pytest.approx(once.over_full("h2o").hi)
    (kept,) = of.kept("h2o")
    assert kept.lost.hi - kept.lost.lo == pytest.approx(
        once.over_full("h2o").hi - once.over_full("h2o").lo
    )
    share = of.exact("h2o")
    assert share is not None and share.hi - share.lo > 0.6  # of four articles; of 16 asks 0.43
    found = of.discordant("h2o")
    assert found is not None and (found.only_row, found.only_recommended) == (0, 8)
    assert found.p == 0.5  # two articles against none, not eight asks against none


def test_a_folder_keeps_documents_and_answers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    answers = tuple(Answered("qa", g, 1.0, [True], [[1]], needle=(9, 0.5)) for g in "aab")
    found = Measurement(np.ones((3, 1), np.float32), answers=answers)
    folder.save_nll("report", "1", found)
    assert folder.losses("report", "1", 0).count == 2
    for _ in range(2):  # as a kept study, which is read back
        folder.shrink(0)
        assert folder.losses("report", "1", 0).groups == ("a", "a", "b")
        assert folder.answers("report", "1") == answers
    folder.close()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whoever_asks_for_the_best_is_given_the_same_policy(data: Any) -> None:
    """Whatever windows rows have; no row that was stopped, and none beyond the budget, is it."""
    draw = data.draw
    whole = draw(st.integers(2, 6))
    value = st.floats(-0.5, 0.5).map(lambda x: round(x, 3))

    def entry(kind: Kind, windows: int) -> Entry:
        mine = [1.0 + i + draw(value) for i in range(windows)]
        return Entry(kind, draw(st.integers(8, 12)), losses(mine), stopped=draw(st.booleans()))

    entries = {n: replace(entry(k, whole), stopped=False, bytes_peak=10)
               for n, k in (("full", "full"), ("mine", "searched"))}  # fmt: skip
    for i in range(draw(st.integers(1, 6))):
        kind, windows = draw(st.sampled_from(KINDS)), draw(st.integers(1, whole))
        entries[f"p{i}"] = entry(kind, windows)
    of = Comparison(entries, "mine", 10)
    for kind in KINDS:
        best, ranked = of.best(kind), of.ranked(kind)
        assert ranked[:1] == [n for n in [best] if n is not None] and "mine" not in ranked
        for name in ranked:  # nobody is ahead of the best on the windows that it shares with `mine`
            e = entries[name]
            assert not e.stopped and e.bytes_peak <= 10
            mine = entries["mine"].losses.first(len(e.losses.sums))
            gap = e.losses.mean() - mine.mean()
            assert of.difference(name, "mine").mean == pytest.approx(gap, abs=1e-9)
            assert of.loss[name] - of.loss["mine"] == pytest.approx(gap, abs=1e-9)
            assert of.loss[name] >= of.loss[best or ""]
    published = of.best("method")
    assert of.leads() == ["full", "mine", *([] if published is None else [published])]
